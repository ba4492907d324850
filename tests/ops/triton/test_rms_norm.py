"""The Triton kernel of rms_norm and add_rms_norm against float64: interpreted, and on the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from compile_ext.ops import add_rms_norm, rms_norm

SHAPES = [(1, 128), (3, 1), (2, 200), (5, 576), (2, 2880), (1, 7168)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def kernel() -> Any:
    return import_module("compile_ext.ops.rms_norm_triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weight", [None, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_against_float64(
    dtype: Any, shape: Any, weight: Any, rounds: bool, adds: bool, device: str
) -> None:
    # The interpreter cuts float32 off to bfloat16, where it should round: an ulp, and not a half.
    truncation = 2.0**-7 if device == "cpu" and dtype == torch.bfloat16 else 0.0
    x = torch.randn(shape, device=device).to(dtype)
    residual = torch.randn(shape, device=device).to(dtype)
    w = None if weight is None else torch.randn(shape[1], device=device).to(weight)
    if adds:
        y, total = kernel().run_add(x, residual, w, 1e-5, rounds)
        torch.testing.assert_close(total, x + residual, rtol=truncation, atol=0)
        assert total.is_contiguous()
    else:
        y = kernel().run(x, w, 1e-5, rounds)
        total = x
    wide = total.double()
    exact = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = exact if w is None else exact * w.double()
    # Two roundings to dtype, of half an ulp each; sums and rsqrt in float32.
    bound = torch.finfo(dtype).eps + 2 * truncation + 2.0**-20
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert bool(((y.double() - exact).abs() <= bound * exact.abs() + 2.0**-24).all())


def test_the_weight_multiplies_after_the_rounding_where_that_is_asked(device: str) -> None:
    """As the reference has it; were both flags one, either would be off by a bit somewhere."""
    x = torch.randn(8, 512, device=device).half()
    w = torch.randn(512, device=device).half()
    for rounds in (True, False):
        got, want = kernel().run(x, w, 1e-6, rounds), rms_norm(x.cpu(), w.cpu(), 1e-6, rounds)
        # The order of the sum differs, and so may the last bit of the mean: of 1 in 2^11 values.
        assert float((got.cpu() != want).float().mean()) < 0.005
    first, second = (kernel().run(x, w, 1e-6, rounds) for rounds in (True, False))
    assert float((first != second).float().mean()) > 0.05


def test_strides(device: str) -> None:
    x = torch.randn(6, 2 * 260, device=device)[::2, ::2]
    residual = torch.randn(260, 3, device=device).t()
    weight = torch.randn(520, device=device)[::2]
    got = kernel().run_add(x, residual, weight, 1e-6, False)
    want = kernel().run_add(x.contiguous(), residual.contiguous(), weight.contiguous(), 1e-6, False)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


def test_prefetching_changes_no_bit(device: str) -> None:
    x, w = torch.randn(3, 300, device=device), torch.randn(300, device=device)
    assert torch.equal(
        kernel().run(x, w, 1e-6, True, prefetch=True), kernel().run(x, w, 1e-6, True)
    )
    early, late = (kernel().run_add(x, x, w, 1e-6, True, prefetch=p) for p in (True, False))
    assert all(map(torch.equal, early, late))


def test_zero_rows_and_what_is_not_finite(device: str) -> None:
    x = torch.randn(4, 300, device=device)
    x[0] = 0
    x[1, 5], x[2, 299] = float("nan"), float("inf")
    y = kernel().run(x, None, 1e-6, False)
    assert bool((y[0] == 0).all())
    assert bool(y[1].isnan().all())  # its NaN is in its mean
    assert bool(y[2, 299].isnan())
    assert bool((y[2, :299] == 0).all())
    assert bool(y[3].isfinite().all())


def test_no_rows(device: str) -> None:
    x = torch.empty(0, 256, device=device)
    assert kernel().run(x, None, 1e-6, False).shape == (0, 256)
    assert [t.shape for t in kernel().run_add(x, x, None, 1e-6, False)] == [(0, 256)] * 2


@pytest.mark.gpu
def test_the_ops_run_it() -> None:
    x, w = torch.randn(3, 7168, device="cuda").bfloat16(), torch.randn(7168, device="cuda")
    assert torch.equal(rms_norm(x, w, 1e-6, True), kernel().run(x, w, 1e-6, True))
    for got, want in zip(
        add_rms_norm(x, x, w), kernel().run_add(x, x, w, 1e-6, False), strict=True
    ):
        assert torch.equal(got, want)
