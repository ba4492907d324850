"""The Triton kernel of the norms that quantize, against float64: interpreted, and on the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops.rms_norm_quantize_fp8 import rms_norm_quantize_fp8_ref

FP8_MAX = 448.0
SHAPES = [(1, 128), (3, 1), (2, 200), (5, 576), (2, 2880)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def kernel() -> Any:
    return import_module("compile_ext.ops.rms_norm_quantize_fp8_triton")


def assert_quantized(q: Tensor, scale: Tensor, y: Tensor, eps: float) -> None:
    """q and scale are those of y, of which each element may be off by ``eps`` of it."""
    m, k = y.shape
    groups = -(-k // 128)
    assert q.shape == y.shape
    assert q.is_contiguous()
    assert scale.stride() == (1, (m + 3) // 4 * 4)
    padded = torch.nn.functional.pad(y, (0, -k % 128)).view(m, groups, 128)
    amax = padded.abs().amax(-1).clamp(min=1e-10)
    torch.testing.assert_close(scale.double(), amax / FP8_MAX, rtol=2 * eps + 2.0**-22, atol=0)
    each = scale.double().repeat_interleave(128, dim=1)[:, :k]
    # Rounded to 3 bits of mantissa: 2^-4 of the element, or half of the smallest, 2^-10.
    bound = (2.0**-4 + 2 * eps) * y.abs() + 2.0**-10 * each
    assert bool(((q.double() * each - y).abs() <= bound).all())


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
        q, scale, total = kernel().run_add(x, residual, w, 1e-5, rounds)
        torch.testing.assert_close(total, x + residual, rtol=truncation, atol=0)
    else:
        q, scale = kernel().run(x, w, 1e-5, rounds)
        total = x
    wide = total.double()
    y = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    y = y if w is None else y * w.double()
    # Two roundings to dtype; sums and rsqrt in float32.
    eps = torch.finfo(dtype).eps + 2 * truncation + 2.0**-20
    assert_quantized(q, scale, y, eps)


def test_zero_rows_and_what_is_not_finite(device: str) -> None:
    x = torch.randn(4, 300, device=device)
    x[0] = 0
    x[1, 5], x[2, 299] = float("nan"), float("inf")
    q, scale = kernel().run(x, None, 1e-6, False)
    assert bool((q[0].float() == 0).all())
    torch.testing.assert_close(scale[0], torch.full_like(scale[0], 1e-10 / FP8_MAX))
    want, _ = rms_norm_quantize_fp8_ref(x, None, 1e-6, False)
    assert torch.equal(q.float().isnan()[[0, 3]], want.float().isnan()[[0, 3]])
    # A NaN in a row is in its mean, and so in the whole row.
    assert bool(q[1].float().isnan().all())
    assert bool(q[2, 299].float().isnan())


def test_every_e4m3_value(device: str) -> None:
    """A row whose quantization holds each of the values: 448 is its largest, so its scale is 1."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    row = torch.cat([values, -values[1:2]]).to(device)  # 128 of them
    # eps so large that the norm is a division by a power of two, which changes no bit.
    eps = 2.0**20 - float(row.double().pow(2).mean())
    q, scale = kernel().run(row[None], None, eps, False)
    assert float(scale[0, 0]) == 448 / 2.0**10 / 448
    assert torch.equal(q[0].float(), row)


def test_strides(device: str) -> None:
    x = torch.randn(6, 2 * 260, device=device)[::2, ::2]
    residual = torch.randn(260, 3, device=device).t()
    weight = torch.randn(520, device=device)[::2]
    got = kernel().run_add(x, residual, weight, 1e-6, False)
    want = kernel().run_add(x.contiguous(), residual.contiguous(), weight.contiguous(), 1e-6, False)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g.float(), w.float())


def test_no_rows(device: str) -> None:
    q, scale = kernel().run(torch.empty(0, 256, device=device), None, 1e-6, False)
    assert q.shape == (0, 256)
    assert scale.shape == (0, 2)


def test_a_nan_spreads_over_its_group(device: str) -> None:
    """Of the weight, whose NaN is in no mean."""
    weight = torch.ones(256, device=device)
    weight[3] = float("nan")
    q, scale = kernel().run(torch.randn(2, 256, device=device), weight, 1e-6, False)
    assert bool(q[:, :128].float().isnan().all())
    assert bool(scale[:, 0].isnan().all())
    assert bool(q[:, 128:].float().isfinite().all())
    assert bool(scale[:, 1].isfinite().all())
