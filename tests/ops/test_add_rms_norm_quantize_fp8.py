"""add_rms_norm_quantize_fp8: the sum, and rms_norm_quantize_fp8 of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import add_rms_norm_quantize_fp8, rms_norm_quantize_fp8
from compile_ext.ops.errors import DeviceError, DtypeError, GradError, RankError, ShapeError

OVERLOAD = torch.ops.compile_ext.add_rms_norm_quantize_fp8.default
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def data(m: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k).to(dtype), (torch.randn(m, k) * 3).to(dtype)


@pytest.mark.parametrize("shape", [(0, 130), (1, 128), (5, 129), (9, 256)], ids=str)
@pytest.mark.parametrize("round_before_weight", [False, True])
@each_dtype
def test_equals_the_sum_and_the_norm_bit_by_bit(shape, round_before_weight, dtype):
    x, residual = data(shape[0], shape[1], dtype)
    w = torch.randn(shape[1]).to(dtype)
    got = add_rms_norm_quantize_fp8(x, residual, w, EPS, round_before_weight)
    total = x + residual
    want = (*rms_norm_quantize_fp8(total, w, EPS, round_before_weight), total)
    for g, t in zip(got, want, strict=True):
        assert (g.dtype, g.shape, g.stride()) == (t.dtype, t.shape, t.stride())
        left, right = (v.clone(memory_format=torch.contiguous_format) for v in (g, t))
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_the_norm_sees_the_rounded_sum():
    x, residual = data(64, 256, torch.bfloat16)
    q, _, _ = add_rms_norm_quantize_fp8(x, residual, None, EPS)
    unrounded, _ = rms_norm_quantize_fp8(x.float() + residual.float(), None, EPS)
    assert (q.float() != unrounded.float()).any()


def test_the_inputs_stay():
    x, residual = data(3, 256, torch.bfloat16)
    kept = x.clone(), residual.clone()
    _, _, total = add_rms_norm_quantize_fp8(x, residual)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    assert total.data_ptr() not in (x.data_ptr(), residual.data_ptr())


LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda m, k: torch.randn(m, k),
    "transposed": lambda m, k: torch.randn(k, m).T,
    "sliced": lambda m, k: torch.randn(m, 2 * k + 2)[:, 2::2],
    "expanded": lambda m, k: torch.randn(1, k).expand(m, k),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype
def test_opcheck(layout, dtype, opcheck):
    for m, k in ((0, 130), (1, 256), (5, 129)):
        x, residual = (LAYOUTS[layout](m, k).to(dtype) for _ in range(2))
        opcheck(OVERLOAD, (x, residual, torch.randn(k), EPS, False))


def valid() -> dict[str, Any]:
    x = torch.ones(2, 32).bfloat16()
    common = {"weight": torch.ones(32), "eps": EPS, "round_before_weight": True}
    return {"x": x, "residual": x.clone(), **common}


BAD = {  # argument, value, error, found, wanted
    "x_int": ("x", torch.ones(2, 32).int(), DtypeError, "x of int32", "bfloat16 or float16"),
    "x_rank_3": ("x", torch.ones(1, 2, 32), RankError, "[1, 2, 32]", "2 dimensions"),
    "r_float": (
        "residual", torch.ones(2, 32), DtypeError, "residual of float32", "bfloat16"),
    "r_of_k": (
        "residual", torch.ones(32).bfloat16(), ShapeError, "residual of shape [32]", "[2, 32]"),
    "r_meta": (
        "residual", torch.ones(2, 32, device="meta").bfloat16(), DeviceError, "residual on meta",
        "one device"),
    "r_grad": (
        "residual", torch.ones(2, 32).bfloat16().requires_grad_(), GradError, "residual that",
        "gradient"),
    "w_of_m": ("weight", torch.ones(2), ShapeError, "weight of shape [2]", "[32]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, assert_refused):
    assert_refused(add_rms_norm_quantize_fp8, valid(), BAD[case])


def test_the_valid_call_of_the_refusals_is_valid():
    _, _, total = add_rms_norm_quantize_fp8(**valid())
    assert total.tolist() == [[2.0] * 32] * 2
