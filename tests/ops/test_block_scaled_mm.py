"""block_scaled_mm against a float64 oracle, with FP8 and with bf16 activations; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import block_scaled_mm, quantize_fp8_groups
from compile_ext.ops.errors import (
    DeviceError,
    DtypeError,
    GradError,
    LayoutError,
    RankError,
    ShapeError,
)

FP8 = torch.float8_e4m3fn
OP = torch.ops.compile_ext.block_scaled_mm.default
SHAPES = [  # m, n, k: one block, partial last blocks in n, in k, in both
    (0, 5, 130),
    (1, 1, 1),
    (1, 128, 128),
    (3, 129, 64),
    (5, 1, 300),
    (33, 257, 1),
    (17, 130, 127),
    (4, 300, 257),
    (7, 576, 576),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def shape_id(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cover(size: int) -> int:
    return -(-size // 128)


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(FP8)


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b = torch.randn(m, k).to(FP8), torch.randn(n, k).to(FP8)
    return a, b, torch.rand(m, cover(k)) + 0.5, torch.rand(cover(n), cover(k)) / 8 + 0.01


def oracle(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    """The formula of the op in float64; element (m, k) has the scale of group k // 128."""
    rows, columns = torch.arange(b.shape[0]) // 128, torch.arange(b.shape[1]) // 128
    x = a.double() * sa.double()[:, columns]
    w = b.double() * sb.double()[rows][:, columns]
    product = torch.einsum("mk,nk->mn", x, w)
    return product if bias is None else product + bias.double()


def magnitude(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None) -> Tensor:
    a, b = a.double().abs(), b.double().abs()
    return oracle(a, b, sa.abs(), sb.abs(), None if bias is None else bias.abs())


@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_equals_the_formula(shape, out_dtype, with_bias, assert_gemm_close):
    a, b, sa, sb = operands(*shape)
    bias = torch.randn(shape[1]) if with_bias else None
    out = block_scaled_mm(a, b, sa, sb, bias, out_dtype)
    assert out.dtype == out_dtype
    exact, bound = oracle(a, b, sa, sb, bias), magnitude(a, b, sa, sb, bias)
    assert_gemm_close(out, exact, bound, shape[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_bias_dtypes_and_the_default_output(dtype, assert_gemm_close):
    args = (*operands(4, 140, 200), torch.randn(140).to(dtype))
    out = block_scaled_mm(*args)
    assert out.dtype == torch.bfloat16
    assert_gemm_close(out, oracle(*args), magnitude(*args), 200)


def strided_cases() -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Operands that are views: (a [6, 200], b [150, 200], scale_a [6, 2], scale_b [2, 2])."""
    a, b, sa, sb = operands(6, 150, 200)
    wide_a, wide_b = torch.randn(12, 256).to(FP8), torch.randn(300, 256).to(FP8)
    return {
        "columns_of_wider": (wide_a[:6, 3:203], wide_b[:150, 56:], sa, sb),
        "every_second_row": (wide_a[::2, :200], wide_b[::2, :200], sa, sb),
        "rows_expanded": (a[:1].expand(6, 200), b[:1].expand(150, 200), sa, sb),
        # What quantize_fp8_groups returns: column-major with padded columns.
        "scale_a_column_major": (a, b, torch.rand(2, 8).T[:6], sb),
        "scales_transposed": (a, b, torch.rand(2, 6).T, torch.rand(2, 2).T),
        "scales_expanded": (a, b, torch.rand(1, 2).expand(6, 2), torch.rand(1, 1).expand(2, 2)),
    }


@pytest.mark.parametrize("case", list(strided_cases()))
def test_strided_inputs(case, assert_gemm_close):
    args = (*strided_cases()[case], None)
    out = block_scaled_mm(*args, torch.float32)
    assert_gemm_close(out, oracle(*args), magnitude(*args), 200)


def test_each_scale_acts_on_its_own_block_only():
    # Powers of two, one nonzero scale at a time: every value is exact, so the blocks show as such.
    a, b = fp8(2, 300), fp8(200, 300)
    for row in range(2):
        for group, size in enumerate((128, 128, 44)):
            sa, sb = torch.ones(2, 3), torch.zeros(2, 3)
            sb[row, group], sa[1, group] = 2, 4
            out = block_scaled_mm(a, b, sa, sb, None, torch.float32)
            expected = torch.zeros(2, 200)
            expected[:, 128 * row : 128 * row + 128] = torch.tensor([[2.0], [8.0]]) * size
            assert torch.equal(out, expected)


def test_largest_and_subnormal_operands_do_not_lose_bits():
    a = torch.tensor([[448.0] * 256, [2.0**-9] * 256]).to(FP8)
    out = block_scaled_mm(a, a, torch.ones(2, 2), torch.ones(1, 2), None, torch.float32)
    # 448 is a power of two times 7: products and sums are exact in float32.
    expected = [[256 * 448.0**2, 256 * 448 * 2.0**-9], [256 * 448 * 2.0**-9, 256 * 2.0**-18]]
    assert out.tolist() == expected


def test_zero_row_gives_the_bias():
    a, b, sa, sb = operands(3, 130, 140)
    a[1] = 0
    bias = torch.randn(130).bfloat16()
    assert torch.equal(block_scaled_mm(a, b, sa, sb, bias)[1], bias)
    x = torch.randn(3, 140).bfloat16()
    x[1] = 0
    assert torch.equal(block_scaled_mm(x, b, None, sb, bias)[1], bias)


def test_nan_stays_in_its_row_and_column(assert_gemm_close):
    a, b, sa, sb = operands(5, 131, 140)
    a.view(torch.uint8)[1, 7] = 0x7F
    b.view(torch.uint8)[130, 139] = 0xFF
    out = block_scaled_mm(a, b, sa, sb, None, torch.float32)
    is_nan = torch.zeros(5, 131, dtype=torch.bool)
    is_nan[1], is_nan[:, 130] = True, True
    assert torch.equal(out.isnan(), is_nan)
    a, b = a.double().nan_to_num(1).to(FP8), b.double().nan_to_num(1).to(FP8)
    exact = oracle(a, b, sa, sb, None).masked_fill(is_nan, torch.nan)
    assert_gemm_close(out, exact, magnitude(a, b, sa, sb, None), 140)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_bf16_nan_or_infinity_makes_its_row_nan(bad):
    x = torch.randn(3, 140).bfloat16()
    x[1, 139] = bad
    _, b, _, sb = operands(3, 5, 140)
    assert block_scaled_mm(x, b, None, sb).isnan().all(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_bf16_activation_is_quantized_as_quantize_fp8_groups_does(shape):
    m, n, k = shape
    x = (torch.randn(m, k) * torch.logspace(-3, 3, k)).bfloat16()
    _, b, _, sb = operands(m, n, k)
    bias = torch.randn(n)
    q, sa = quantize_fp8_groups(x)
    want = block_scaled_mm(q, b, sa, sb, bias, torch.float32)
    assert torch.equal(block_scaled_mm(x, b, None, sb, bias, torch.float32), want)
    strided = torch.cat([x, x], dim=1)[:, :k]
    assert torch.equal(block_scaled_mm(strided, b, None, sb, bias, torch.float32), want)


@pytest.mark.parametrize(
    "placeholder",
    [
        torch.ones(4, 2),
        torch.full((4, 2), torch.nan),
        torch.ones(1),
        torch.zeros(0),
        torch.ones(3, 3, dtype=torch.int64),
    ],
    ids=["ones", "nan", "one_element", "empty", "other_dtype_and_shape"],
)
def test_bf16_activation_leaves_scale_a_unread(placeholder):
    x, (_, b, _, sb) = torch.randn(4, 140).bfloat16(), operands(4, 130, 140)
    want = block_scaled_mm(x, b, None, sb)
    assert want.isfinite().all()
    assert torch.equal(block_scaled_mm(x, b, placeholder, sb), want)


def test_no_grad_and_inference_mode_take_parameters():
    a, b, sa, sb = operands(2, 3, 16)
    want = block_scaled_mm(a, b, sa, sb)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(block_scaled_mm(a, b.requires_grad_(), sa, sb), want)


@pytest.mark.parametrize(
    "shape", [(0, 5, 130), (1, 1, 1), (3, 129, 64), (4, 130, 257)], ids=shape_id
)
@pytest.mark.parametrize(
    ("activation", "out_dtype", "bias_dtype"),
    [
        (FP8, torch.bfloat16, None),
        (FP8, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float32),
    ],
    ids=["fp8", "fp8_bias", "bf16_bias"],
)
def test_opcheck(shape, activation, out_dtype, bias_dtype, opcheck):
    m, n, k = shape
    _, b, sa, sb = operands(m, n, k)
    a = torch.randn(m, k + 3).to(activation)[:, :k]
    bias = None if bias_dtype is None else torch.randn(n).to(bias_dtype)
    for x in (a, a.contiguous()):
        opcheck(OP, (x, b, sa if activation == FP8 else None, sb, bias, out_dtype))


def valid() -> dict[str, Any]:
    return {
        "a": fp8(4, 200),
        "b": fp8(300, 200),
        "scale_a": torch.ones(4, 2),
        "scale_b": torch.ones(3, 2),
        "bias": torch.ones(300),
        "out_dtype": torch.bfloat16,
    }


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "a_fp16": (
        "a", torch.ones(4, 200).half(), DtypeError, "a of float16", "float8_e4m3fn or bfloat16"),
    "b_bf16": ("b", torch.ones(300, 200).bfloat16(), DtypeError, "b of bfloat16", "float8_e4m3fn"),
    "scale_a_fp64": ("scale_a", torch.ones(4, 2).double(), DtypeError, "float64", "float32"),
    "scale_b_fp16": ("scale_b", torch.ones(3, 2).half(), DtypeError, "float16", "float32"),
    "bias_int": ("bias", torch.ones(300).int(), DtypeError, "bias of int32", "bfloat16 or float16"),
    "out_fp8": (
        "out_dtype", FP8, DtypeError, "out_dtype torch.float8", "float16", "leave out_dtype out"),
    "a_rank_1": ("a", fp8(200), RankError, "a of shape [200]", "2 dimensions"),
    "b_rank_3": ("b", fp8(1, 300, 200), RankError, "b of shape [1, 300, 200]", "2 dimensions"),
    "other_k": (
        "b", fp8(300, 199), ShapeError, "a [4, 200] and b [300, 199]", "one k", "untransposed"),
    "no_scale_a": (
        "scale_a", None, ShapeError, "without scale_a", "scale_a [m, ceil(k/128)]",
        "pass what quantize_fp8_groups returned, or a bfloat16 a"),
    "scale_a_one": ("scale_a", torch.ones(4, 1), ShapeError, "scale_a of shape [4, 1]", "[4, 2]"),
    "scale_a_flat": ("scale_a", torch.ones(8), ShapeError, "scale_a of shape [8]", "[4, 2]"),
    "scale_a_transposed": ("scale_a", torch.ones(2, 4), ShapeError, "shape [2, 4]", "[4, 2]"),
    "scale_b_floor": ("scale_b", torch.ones(2, 1), ShapeError, "scale_b of shape [2, 1]", "[3, 2]"),
    "bias_of_k": ("bias", torch.ones(200), ShapeError, "bias of shape [200]", "[300]"),
    "a_transposed": (
        "a", fp8(200, 4).T, LayoutError, "[4, 200] with strides [1, 4]", "stride 1 in the last"),
    "a_bf16_transposed": (
        "a", torch.ones(200, 4).bfloat16().T, LayoutError, "strides [1, 4]", "stride 1 in"),
    "b_every_second": ("b", fp8(300, 400)[:, ::2], LayoutError, "strides [400, 2]", "stride 1 in"),
    "b_meta": ("b", fp8(300, 200).to("meta"), DeviceError, "b on meta and a on cpu", "one device"),
    "scale_a_meta": (
        "scale_a", torch.ones(4, 2, device="meta"), DeviceError, "scale_a on meta", "one device"),
    "scale_b_meta": (
        "scale_b", torch.ones(3, 2, device="meta"), DeviceError, "scale_b on meta", "one device"),
    "bias_meta": ("bias", torch.ones(300, device="meta"), DeviceError, "bias on meta", "one dev"),
    "bias_grad": (
        "bias", torch.ones(300).requires_grad_(), GradError, "bias that requires", "gradient"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, assert_refused):
    assert_refused(block_scaled_mm, valid(), BAD[case])


def test_the_valid_call_of_the_refusals_is_valid():
    assert torch.equal(block_scaled_mm(**valid()), torch.full((4, 300), 201.0).bfloat16())
