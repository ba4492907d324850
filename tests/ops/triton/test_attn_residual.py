"""The Triton kernel of attn_residual against float64: interpreted, and on the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import attn_residual

SHAPES = [(1, 8, 256), (3, 1, 129), (5, 3, 64), (2, 0, 130), (2, 2, 1), (1, 9, 7168)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def run(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    y, mixed = import_module("compile_ext.ops.attn_residual_triton").run(*args, **options)
    return y, mixed


def data(shape: Any, dtype: Any, device: str) -> tuple[Tensor, Tensor, Tensor]:
    m, length, k = shape
    sizes = torch.logspace(-1, 1, length + 1)[:, None]
    stack = (torch.randn(m, length + 1, k) * sizes).to(dtype).to(device)
    return stack[:, length], stack[:, :length], torch.randn(k, device=device) * 2 / k**0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight", [None, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rounds", [True, False])
def test_against_float64(dtype: Any, shape: Any, weight: Any, rounds: bool, device: str) -> None:
    # The interpreter cuts float32 off to bfloat16, where it should round: an ulp, and not a half.
    truncation = 2.0**-7 if device == "cpu" and dtype == torch.bfloat16 else 0.0
    x, blocks, query = data(shape, dtype, device)
    w = None if weight is None else torch.randn(shape[2], device=device).to(weight)
    y, mixed = run(x, blocks, query, EPS, w, EPS, rounds)

    v = torch.cat((blocks, x[:, None]), 1).double()
    keys = v * (v.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    weights = (keys * query.double()).sum(-1).softmax(-1)
    exact, magnitude = (torch.einsum("ml,mlk->mk", weights, t) for t in (v, v.abs()))
    # Scores are sums of k products in float32 (below 32 together): their exponentials are off by
    # some 2^-18, relatively. Then one rounding to dtype.
    bound = 2.0**-18 * magnitude + (torch.finfo(dtype).eps / 2 + truncation) * exact.abs()
    assert mixed.dtype == dtype
    assert mixed.is_contiguous()
    assert bool(((mixed.double() - exact).abs() <= bound + 2.0**-24).all())

    wide = mixed.double()
    exact = wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    exact = exact if w is None else exact * w.double()
    # Two roundings to dtype; sums and rsqrt in float32.
    bound = torch.finfo(dtype).eps + 2 * truncation + 2.0**-20
    assert y.is_contiguous()
    assert bool(((y.double() - exact).abs() <= bound * exact.abs() + 2.0**-24).all())


def test_strides(device: str) -> None:
    stack = torch.randn(5, 3, 2 * 130, device=device)[..., ::2].transpose(0, 1)  # [3, 5, 130]
    x = torch.randn(130, 3, device=device).t()
    query, weight = torch.randn(2, 260, device=device)[:, ::2] / 10
    got = run(x, stack, query, EPS, weight, EPS, False)
    dense = [t.contiguous() for t in (x, stack, query, weight)]
    want = run(*dense[:3], EPS, dense[3], EPS, False)
    for one, other in zip(got, want, strict=True):
        # On a GPU other strides are other layouts, which sum in another order: 130 numbers.
        assert torch.allclose(one, other, rtol=2.0**-18, atol=2.0**-22)


def test_large_scores(device: str) -> None:
    """Their exponentials alone would overflow; in any order of the rows."""
    x, blocks, query = data((2, 5, 64), torch.float32, device)
    for flipped in (blocks, blocks.flip(1)):
        _, mixed = run(x, flipped, query * 1000, EPS, None, EPS, False)
        _, want = attn_residual(x.cpu(), flipped.cpu(), query.cpu() * 1000, EPS)
        torch.testing.assert_close(mixed.cpu(), want, rtol=1e-4, atol=1e-4)  # 2^-18 of exp's input


def test_what_is_not_finite_stays_in_its_row(device: str) -> None:
    x, blocks, query = data((4, 3, 64), torch.float32, device)
    x, blocks = x.clone(), blocks.clone()
    x[1, 5], blocks[2, 1, 7] = float("nan"), float("inf")
    y, mixed = run(x, blocks, query, EPS, None, EPS, False)
    assert bool(mixed[1:3].isnan().all())
    assert bool(y[1:3].isnan().all())
    assert bool(mixed[[0, 3]].isfinite().all())
    assert bool(y[[0, 3]].isfinite().all())


def test_prefetching_changes_no_bit(device: str) -> None:
    x, blocks, query = data((3, 4, 300), torch.float32, device)
    early, late = (run(x, blocks, query, EPS, query, EPS, True, prefetch=p) for p in (True, False))
    assert all(map(torch.equal, early, late))


def test_no_rows(device: str) -> None:
    x, blocks, query = data((0, 4, 32), torch.float32, device)
    assert [t.shape for t in run(x, blocks, query, EPS, None, EPS, True)] == [(0, 32)] * 2


@pytest.mark.gpu
def test_the_op_runs_it() -> None:
    x, blocks, query = data((3, 8, 7168), torch.bfloat16, "cuda")
    got, want = attn_residual(x, blocks, query, EPS), run(x, blocks, query, EPS, None, 1e-6, False)
    assert all(map(torch.equal, got, want))
