"""rms_norm and add_rms_norm: the norms that they stand for bit by bit, float64, edges, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_ext.ops import add_rms_norm, rms_norm
from compile_ext.ops.errors import DeviceError, DtypeError, GradError, RankError, ShapeError

OPS = torch.ops.compile_ext
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def data(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    # Magnitudes over three decades within a row.
    return (torch.randn(shape) * torch.logspace(-2, 1, shape[-1])).to(dtype)


def same(got: Tensor, want: Tensor) -> bool:
    """The same form and bits."""
    form = (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    return form and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


# ---- the norms that people write -----------------------------------------------------------------


def transformers_norm(module: str, name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        made = getattr(pytest.importorskip(f"transformers.models.{module}"), name)(w.numel(), EPS)
        made.weight = nn.Parameter(w)
        result: Tensor = made(x)
        return result

    return norm


def vllm(x: Tensor, w: Tensor) -> Tensor:  # 0.33, RMSNorm.forward_native
    orig_dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(dim=-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return x.to(orig_dtype) * w


def fused(x: Tensor, w: Tensor) -> Tensor:  # what eager calls on CUDA
    y: Tensor = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], w, EPS)[0]
    return y


LLAMA = "llama.modeling_llama", "LlamaRMSNorm"
DEEPSEEK = "deepseek_v3.modeling_deepseek_v3", "DeepseekV3RMSNorm"
GEMMA = "gemma.modeling_gemma", "GemmaRMSNorm"
GPT_OSS = "gpt_oss.modeling_gpt_oss", "GptOssRMSNorm"
NORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {  # round_before_weight
    "F.rms_norm": (lambda x, w: F.rms_norm(x, (x.shape[-1],), w, EPS), False),
    "aten._fused_rms_norm": (fused, False),
    "Gemma": (transformers_norm(*GEMMA), False),
    "gpt-oss": (transformers_norm(*GPT_OSS), False),
    "Llama": (transformers_norm(*LLAMA), True),
    "Qwen3": (transformers_norm("qwen3.modeling_qwen3", "Qwen3RMSNorm"), True),
    "DeepSeek-V3": (transformers_norm(*DEEPSEEK), True),
    "T5": (transformers_norm("t5.modeling_t5", "T5LayerNorm"), True),
    "Llama 4": (transformers_norm("llama4.modeling_llama4", "Llama4TextRMSNorm"), True),
    "vLLM": (vllm, True),
}


@pytest.mark.parametrize("spelling", NORMS)
@pytest.mark.parametrize("shape", [(1, 128), (5, 129), (9, 256), (3, 300)], ids=str)
@each_dtype
@torch.no_grad()
def test_equals_the_spelling_bit_by_bit(spelling, shape, dtype):
    norm, round_before_weight = NORMS[spelling]
    x, w = data(shape, dtype), torch.randn(shape[1]).to(dtype)
    weight = 1.0 + w.float() if spelling == "Gemma" else w
    want = norm(x, w)
    assert same(rms_norm(x, weight, EPS, round_before_weight), want)


@pytest.mark.parametrize("shape", [(0, 130), (1, 128), (5, 129), (9, 256)], ids=str)
@pytest.mark.parametrize("round_before_weight", [False, True])
@each_dtype
def test_of_a_sum(shape, round_before_weight, dtype):
    x, residual, w = data(shape, dtype), data(shape, dtype) * 3, torch.randn(shape[1]).to(dtype)
    y, total = add_rms_norm(x, residual, w, EPS, round_before_weight)
    assert same(total, x + residual)
    assert same(y, rms_norm(x + residual, w, EPS, round_before_weight))
    assert total.data_ptr() not in (x.data_ptr(), residual.data_ptr()) or not shape[0]


def test_the_norm_sees_the_rounded_sum():
    x, residual = data((64, 256)), data((64, 256)) * 3
    unrounded = rms_norm(x.float() + residual.float(), None, EPS).bfloat16()
    assert not torch.equal(add_rms_norm(x, residual, None, EPS)[0], unrounded)


def test_where_the_rounding_is_makes_a_difference():
    x, w = data((64, 256)), torch.randn(256).bfloat16()
    assert not same(rms_norm(x, w, EPS, True), rms_norm(x, w, EPS, False))


@each_dtype
def test_without_a_weight(dtype):
    x = data((7, 300), dtype)
    for flag in (False, True):
        assert same(rms_norm(x, None, EPS, flag), F.rms_norm(x, (300,), None, EPS))


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_the_weight_may_have_another_dtype(weight_dtype):
    x, w = data((6, 256)), torch.randn(256).to(weight_dtype)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    assert same(rms_norm(x, w, EPS, False), (wide * w.float()).bfloat16())
    assert same(rms_norm(x, w, EPS, True), (wide.bfloat16().float() * w.float()).bfloat16())


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 129), (130, 127), (2, 7168)], ids=str)
@each_dtype
def test_stays_near_float64(shape, dtype):
    x, w = data(shape, dtype), (torch.randn(shape[1]) + 2).to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double()
    # One rounding to x's dtype; the float32 work (a mean of k squares, in blocks) is below 2^-20.
    bound = exact.abs() * (torch.finfo(dtype).eps / 2 + 2.0**-20) + torch.finfo(dtype).tiny
    assert ((rms_norm(x, w, EPS).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_nan_and_infinity_stay_in_their_row(bad):
    x = data((5, 260))
    want = rms_norm(x, None, EPS)
    x[2, 7] = bad
    got = rms_norm(x, None, EPS)
    assert torch.equal(got[[0, 1, 3, 4]], want[[0, 1, 3, 4]])
    assert bool(got[2, 7].isnan())  # inf * rsqrt(inf)


def test_rows_of_zeros_stay():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), EPS), torch.zeros(2, 8))


# ---- as ops --------------------------------------------------------------------------------------

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
        weight = torch.randn(2 * k)[::2]
        opcheck(OPS.rms_norm.default, (x, None if m == 1 else weight, EPS, True))
        more = None if m == 5 else weight, EPS, False, True
        opcheck(OPS.add_rms_norm.default, (x, residual, *more))


def test_autocast_does_not_reach_the_reference():
    x, w = data((3, 256)), torch.randn(256)
    want = rms_norm(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(rms_norm(x, w), want)


def valid() -> dict[str, Any]:
    x = torch.ones(2, 32).bfloat16()
    common = {"weight": torch.ones(32), "eps": EPS, "round_before_weight": True}
    return {"x": x, "residual": x.clone(), **common}


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "x_int": ("x", torch.ones(2, 32).int(), DtypeError, "x of int32", "bfloat16 or float16"),
    "x_double": ("x", torch.ones(2, 32).double(), DtypeError, "x of float64", "or float32"),
    "x_rank_3": ("x", torch.ones(1, 2, 32), RankError, "[1, 2, 32]", "2 dimensions"),
    "x_k_0": ("x", torch.ones(2, 0), ShapeError, "x of shape [2, 0]", "k >= 1", "pass a row"),
    "w_double": (
        "weight", torch.ones(32).double(), DtypeError, "weight of float64", "or float32"),
    "w_of_m": ("weight", torch.ones(2), ShapeError, "weight of shape [2]", "[32]"),
    "w_meta": (
        "weight", torch.ones(32, device="meta"), DeviceError, "weight on meta", "one device"),
    "w_grad": ("weight", torch.ones(32).requires_grad_(), GradError, "weight that", "gradient"),
}  # fmt: skip
BAD_SUM = {
    "x_int": BAD["x_int"],
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
    "w_of_m": BAD["w_of_m"],
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, assert_refused):
    without = {k: v for k, v in valid().items() if k != "residual"}
    assert_refused(rms_norm, without, BAD[case])


@pytest.mark.parametrize("case", BAD_SUM)
def test_the_sum_refuses(case, assert_refused):
    assert_refused(add_rms_norm, valid(), BAD_SUM[case])


def test_the_valid_call_of_the_refusals_is_valid():
    y, total = add_rms_norm(**valid())
    assert total.tolist() == [[2.0] * 32] * 2
    assert y.tolist() == [[1.0] * 32] * 2
