"""scaled_mm against a float64 oracle, over shapes, scale forms and layouts; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import scaled_mm
from compile_ext.ops.errors import (
    DeviceError,
    DtypeError,
    GradError,
    LayoutError,
    RankError,
    ShapeError,
)

FP8 = torch.float8_e4m3fn
OP = torch.ops.compile_ext.scaled_mm.default
SHAPES = [  # m, n, k
    (0, 5, 16),
    (1, 1, 1),
    (1, 48, 128),
    (3, 5, 7),
    (17, 129, 127),
    (5, 1, 300),
    (33, 257, 1),
    (2, 1030, 40),  # the reference takes 1024 rows of b at a time
    (64, 64, 64),
]
FORMS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "scalar": lambda size: (),
    "one": lambda size: (1,),
    "one_by_one": lambda size: (1, 1),
    "vector": lambda size: (size,),
    "column": lambda size: (size, 1),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(FP8)


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k).to(FP8), torch.randn(n, k).to(FP8)


def scales(form_a: str, form_b: str, m: int, n: int) -> tuple[Tensor, Tensor]:
    # Different ranges, so that swapped scales show.
    return torch.rand(FORMS[form_a](m)) + 0.5, torch.rand(FORMS[form_b](n)) / 8 + 0.01


def oracle(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    """The formula of the op, an explicit sum over k in float64."""
    product = torch.einsum("mk,nk->mn", a.double(), b.double())
    scaled = product * sa.double().reshape(-1, 1) * sb.double().reshape(1, -1)
    return scaled if bias is None else scaled + bias.double()


def magnitude(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    a, b = a.double().abs().nan_to_num(0), b.double().abs().nan_to_num(0)
    return oracle(a, b, sa.abs(), sb.abs(), None if bias is None else bias.abs())


@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_equals_the_formula(shape, out_dtype, with_bias, assert_gemm_close):
    m, n, k = shape
    a, b = operands(m, n, k)
    sa, sb = scales("column", "column", m, n)
    bias = torch.randn(n) if with_bias else None
    out = scaled_mm(a, b, sa, sb, bias, out_dtype)
    assert out.dtype == out_dtype
    assert_gemm_close(out, oracle(a, b, sa, sb, bias), magnitude(a, b, sa, sb, bias), k)


@pytest.mark.parametrize("form_b", FORMS)
@pytest.mark.parametrize("form_a", FORMS)
def test_every_form_of_the_scales(form_a, form_b, assert_gemm_close):
    a, b = operands(6, 9, 33)
    args = (a, b, *scales(form_a, form_b, 6, 9), None)
    out = scaled_mm(*args, out_dtype=torch.float32)
    assert_gemm_close(out, oracle(*args), magnitude(*args), 33)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_bias_dtypes_and_the_default_output(dtype, assert_gemm_close):
    a, b = operands(4, 7, 20)
    args = (a, b, *scales("one", "vector", 4, 7), torch.randn(7).to(dtype))
    out = scaled_mm(*args)
    assert out.dtype == torch.bfloat16
    assert_gemm_close(out, oracle(*args), magnitude(*args), 20)


def strided_cases() -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Operands that are views: (a [6, 33], b [9, 33], scale_a, scale_b, bias)."""
    a, b = operands(12, 18, 64)
    sa, sb, bias = torch.rand(12, 2) + 0.5, torch.rand(18, 2) + 0.5, torch.randn(18)
    dense, plain = (
        (a[:6, :33].contiguous(), b[:9, :33].contiguous()),
        (sa[:6, 0], sb[:9, 0], bias[:9]),
    )
    return {
        "columns_of_wider": (a[:6, :33], b[:9, 31:], *plain),
        "every_second_row": (a[::2, 1:34], b[::2, :33], *plain),
        "one_row_expanded": (a[:1, :33].expand(6, 33), b[:1, :33].expand(9, 33), *plain),
        "scale_and_bias_columns": (*dense, sa[:6, 1:], sb[9:, :1], bias[::2]),
        "scales_expanded": (*dense, sa[:1, :1].expand(6, 1), sb[0, 0].expand(9), plain[2]),
        # A row of one element has no stride that matters.
        "k_is_1": (a.T[:6, :1], b.T[:9, :1], *plain),
    }


@pytest.mark.parametrize("case", list(strided_cases()))
def test_strided_inputs(case, assert_gemm_close):
    args = strided_cases()[case]
    out = scaled_mm(*args, torch.float32)
    assert_gemm_close(out, oracle(*args), magnitude(*args), args[0].shape[1])


def test_m_0_gives_an_empty_result_whatever_the_strides():
    a = torch.empty(16, 0, dtype=FP8).T
    out = scaled_mm(a, operands(1, 5, 16)[1], torch.ones(0, 1), torch.ones(1), torch.ones(5))
    assert (out.shape, out.stride(), out.dtype) == ((0, 5), (5, 1), torch.bfloat16)


def test_every_finite_code_is_exact():
    # All 254 finite e4m3 values, subnormals and +-448 among them, times one: nothing rounds.
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).view(FP8)
    one = torch.ones(1)
    out = scaled_mm(codes.reshape(-1, 1), one.reshape(1, 1).to(FP8), one, one, None, torch.float32)
    assert torch.equal(out.flatten(), codes.float())
    assert out.abs().max() == 448
    assert out[1] == 2.0**-9


def test_largest_and_subnormal_operands_do_not_lose_bits():
    a = torch.tensor([[448.0] * 256, [2.0**-9] * 256]).to(FP8)
    out = scaled_mm(a, a, torch.ones(1), torch.ones(1), None, torch.float32)
    expected = [[256 * 448.0**2, 256 * 448 * 2.0**-9], [256 * 448 * 2.0**-9, 256 * 2.0**-18]]
    assert out.tolist() == expected  # all powers of two times 7: exact in float32


def test_zero_row_gives_the_bias():
    a, b = operands(3, 5, 40)
    a[1] = 0
    bias = torch.randn(5).bfloat16()
    sa, sb = scales("column", "column", 3, 5)
    assert torch.equal(scaled_mm(a, b, sa, sb, bias)[1], bias)
    assert torch.equal(scaled_mm(a, b, sa, sb)[1], torch.zeros(5).bfloat16())


def test_nan_stays_in_its_row_and_column(assert_gemm_close):
    a, b = operands(5, 6, 33)
    a.view(torch.uint8)[1, 7] = 0x7F
    b.view(torch.uint8)[4, 0] = 0xFF
    args = (a, b, *scales("column", "column", 5, 6), None)
    out = scaled_mm(*args, torch.float32)
    is_nan = torch.zeros(5, 6, dtype=torch.bool)
    is_nan[1], is_nan[:, 4] = True, True
    assert torch.equal(out.isnan(), is_nan)
    assert_gemm_close(out, oracle(*args), magnitude(*args), 33)


def test_no_grad_and_inference_mode_take_parameters():
    a, b = operands(2, 3, 16)
    args = (a, b.requires_grad_(), torch.ones(1).requires_grad_(), torch.ones(3))
    want = scaled_mm(a, b.detach(), torch.ones(1), torch.ones(3))
    with torch.no_grad():
        assert torch.equal(scaled_mm(*args), want)
    with torch.inference_mode():
        assert torch.equal(scaled_mm(*args), want)


@pytest.mark.parametrize("shape", [(0, 5, 16), (1, 1, 1), (3, 5, 7), (17, 129, 130)], ids=shape_id)
@pytest.mark.parametrize(
    ("forms", "out_dtype", "bias_dtype"),
    [
        (("scalar", "one"), torch.bfloat16, None),
        (("vector", "column"), torch.float32, torch.bfloat16),
        (("column", "one_by_one"), torch.float16, torch.float32),
    ],
    ids=["per_tensor", "vector_column_bias", "token_bias"],
)
def test_opcheck(shape, forms, out_dtype, bias_dtype, opcheck):
    m, n, k = shape
    a, b = operands(m, n, k + 3)
    form_a, form_b = forms
    bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
    sa, sb = scales(form_a, form_b, m, n)
    for x in (a[:, :k], a[:, :k].contiguous()):
        opcheck(OP, (x, b[:, :k], sa, sb, bias, out_dtype))


def valid() -> dict[str, Any]:
    return {
        "a": fp8(4, 32),
        "b": fp8(6, 32),
        "scale_a": torch.ones(4, 1),
        "scale_b": torch.ones(6, 1),
        "bias": torch.ones(6),
        "out_dtype": torch.bfloat16,
    }


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "a_bf16": (
        "a", torch.ones(4, 32).bfloat16(), DtypeError, "a of bfloat16", "float8_e4m3fn"),
    "b_e5m2": (
        "b", torch.ones(6, 32).to(torch.float8_e5m2), DtypeError, "float8_e5m2", "float8_e4m3fn"),
    "scale_a_bf16": (
        "scale_a", torch.ones(4, 1).bfloat16(), DtypeError, "scale_a of bfloat16", "float32"),
    "bias_fp64": (
        "bias", torch.ones(6).double(), DtypeError, "bias of float64", "bfloat16 or float16 or"),
    "out_int8": (
        "out_dtype", torch.int8, DtypeError, "out_dtype torch.int8", "bfloat16", "leave out_dtype"),
    "a_rank_3": ("a", fp8(1, 4, 32), RankError, "a of shape [1, 4, 32]", "2 dimensions"),
    "b_rank_1": ("b", fp8(32), RankError, "b of shape [32]", "2 dimensions"),
    "other_k": (
        "b", fp8(6, 31), ShapeError, "a [4, 32] and b [6, 31]", "with one k", "untransposed"),
    "scale_a_of_n": (
        "scale_a", torch.ones(6, 1), ShapeError, "[6, 1]", "[4, 1] or [4] or [1, 1] or [1] or []"),
    "scale_b_a_row": (
        "scale_b", torch.ones(1, 6), ShapeError, "scale_b of shape [1, 6]", "[6, 1] or [6] or"),
    "bias_of_m": ("bias", torch.ones(4), ShapeError, "bias of shape [4]", "[6]"),
    "bias_rank_2": ("bias", torch.ones(1, 6), ShapeError, "bias of shape [1, 6]", "[6]"),
    "a_transposed": ("a", fp8(32, 4).T, LayoutError, "[4, 32] with strides [1, 4]", "stride 1 in"),
    "b_every_second": ("b", fp8(6, 64)[:, ::2], LayoutError, "strides [64, 2]", "stride 1 in"),
    "a_meta": (
        "a", fp8(4, 32).to("meta"), DeviceError, "b on cpu and a on meta", "one device",
        "move b with .to('meta')"),
    "b_meta": ("b", fp8(6, 32).to("meta"), DeviceError, "b on meta and a on cpu", "one device"),
    "scale_b_meta": (
        "scale_b", torch.ones(6, 1, device="meta"), DeviceError, "scale_b on meta", "one device"),
    "bias_meta": ("bias", torch.ones(6, device="meta"), DeviceError, "bias on meta", "one device"),
    "b_grad": ("b", fp8(6, 32).requires_grad_(), GradError, "b that requires", "no gradient"),
    "scale_b_grad": (
        "scale_b", torch.ones(6, 1).requires_grad_(), GradError, "scale_b that", "gradient"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, assert_refused):
    assert_refused(scaled_mm, valid(), BAD[case])


def test_the_valid_call_of_the_refusals_is_valid():
    assert torch.equal(scaled_mm(**valid()), torch.full((4, 6), 33.0).bfloat16())
