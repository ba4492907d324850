"""The Triton kernel of rms_norm_router against float64, interpreted or on the GPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = [(8, 64), (5, 1), (3, 2049), (259, 130), (0, 64), (4, 4096)]


def run(*args: object, **options: bool) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = import_module(
        "compile_ext.ops.rms_norm_router_triton"
    ).run(*args, **options)
    return found


def check(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, b: Tensor, bias: Tensor | None
) -> None:
    y, total, logits = run(x, residual, weight, 1e-6, False, b, bias)
    row = x if residual is None else x + residual
    if residual is None:
        assert total.shape == (0,)
    else:
        assert torch.equal(total, row)
        assert total.is_contiguous()
    exact = row.double() * torch.rsqrt((row.double() ** 2).mean() + 1e-6)
    exact = exact if weight is None else exact * weight.double()
    assert y.dtype == x.dtype
    # One rounding to x's dtype, and a norm in float32. Triton's interpreter cuts off where it
    # should round, which is twice as much.
    ulp = torch.finfo(x.dtype).eps
    assert bool(((y.double() - exact).abs() <= 2 * ulp * exact.abs()).all())
    added = 0.0 if bias is None else bias.double()
    want, magnitude = exact @ b.double().t() + added, exact.abs() @ b.double().abs().t() + 1
    assert (logits.dtype, logits.shape) == (F32, (1, b.shape[0]))
    # k products summed in float32, in any order, and the norm's few roundings; not y's to 16 bits.
    assert bool(((logits - want).abs() <= (x.shape[1] + 8) * 2.0**-24 * magnitude).all())


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "has"), [(BF16, "bias"), (F32, "weight"), (BF16, "nothing")])
def test_shapes(n: int, k: int, dtype: torch.dtype, has: str, device: str) -> None:
    x, b = torch.randn(1, k).to(dtype).to(device), torch.randn(n, k).bfloat16().to(device)
    weight = None if has == "nothing" else torch.rand(k).to(dtype).to(device)
    check(x, None, weight, b, torch.randn(n).to(device) if has == "bias" else None)


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_of_a_sum(n: int, k: int, device: str) -> None:
    # float32: Triton's interpreter does not round sums to bfloat16, it cuts them off.
    dtype = F32 if device == "cpu" else BF16
    x, residual = (torch.randn(1, k).to(dtype).to(device) for _ in range(2))
    check(x, residual, torch.rand(k).to(dtype).to(device), torch.randn(n, k).to(device), None)


def test_rounds_before_the_weight(device: str) -> None:
    """What is normed to 1 + 2^-9 is 1 in bfloat16, so y is the weight; the logits know better."""
    k = 64
    x = torch.full((1, k), 1.0)
    x[0, 0] = 1.03
    weight, b = torch.full((k,), 1.0 + 2.0**-7).bfloat16(), torch.eye(4, k).bfloat16()
    x, weight, b = (t.bfloat16().to(device) for t in (x, weight, b))
    y, _, logits = run(x, None, weight, 0.0, True, b, None)
    normed = (x.double() / (x.double() ** 2).mean().sqrt()).cpu()
    rounded = normed.bfloat16() * weight.cpu()
    if device == "cuda":  # the interpreter cuts off
        assert torch.equal(y.cpu(), rounded)
    want = (normed * weight.double().cpu())[:, :4]
    assert torch.allclose(logits.double().cpu(), want, rtol=2.0**-21, atol=0)


def test_any_strides(device: str) -> None:
    k = 300
    x = torch.randn(1, 2 * k).bfloat16().to(device)[:, ::2]
    weight = torch.rand(3 * k).bfloat16().to(device)[::3]
    b = torch.randn(k, 7).bfloat16().to(device).t()
    check(x, None, weight, b, torch.randn(14).to(device)[::2])
