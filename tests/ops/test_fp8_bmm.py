"""fp8_bmm against einsum in float64; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext.ops import fp8_bmm
from compile_ext.ops.errors import (
    DeviceError,
    DtypeError,
    GradError,
    LayoutError,
    RankError,
    ShapeError,
)

FP8 = torch.float8_e4m3fn
OP = torch.ops.compile_ext.fp8_bmm.default
SHAPES = [  # b, h, d, r: no tokens, no heads, partial blocks, the sizes of DeepSeek-V3 (2 heads)
    (0, 3, 5, 130),
    (3, 0, 5, 130),
    (1, 1, 1, 1),
    (5, 3, 128, 128),
    (4, 2, 257, 64),
    (3, 4, 130, 257),
    (2, 2, 512, 128),
    (2, 2, 128, 512),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def cover(size: int) -> int:
    return -(-size // 128)


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(FP8)


def operands(b: int, h: int, d: int, r: int) -> Operands:
    x, w = torch.randn(b, h, r).to(FP8), torch.randn(h, d, r).to(FP8)
    return x, w, torch.rand(b, h, cover(r)) + 0.5, torch.rand(h, cover(d), cover(r)) / 8 + 0.01


@pytest.fixture
def assert_right(dequantize64, assert_gemm_close):
    """The op's result for these arguments is einsum's, in float64."""

    def check(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, dtype: Any) -> None:
        x, w = dequantize64(a, sa, 1), dequantize64(b, sb, 128)
        out = fp8_bmm(a, b, sa, sb, dtype)
        assert out.dtype == dtype
        exact = torch.einsum("bhr,hdr->bhd", x, w)
        magnitude = torch.einsum("bhr,hdr->bhd", x.abs(), w.abs())
        assert_gemm_close(out, exact, magnitude, a.shape[2])

    return check


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_einsum(shape, out_dtype, assert_right):
    assert_right(*operands(*shape), out_dtype)


def test_the_default_output_is_bfloat16():
    args = operands(2, 3, 5, 130)
    assert torch.equal(fp8_bmm(*args), fp8_bmm(*args, torch.bfloat16))


def strided_cases() -> dict[str, Operands]:
    """Operands that are views: (a [6, 2, 200], b [2, 150, 200], scales)."""
    a, b, sa, sb = operands(6, 2, 150, 200)
    wide_a, wide_b = torch.randn(12, 4, 256).to(FP8), torch.randn(4, 300, 256).to(FP8)
    return {
        # q_nope of MLA: the first part of each head's query.
        "columns_of_wider": (wide_a[:6, :2, :200], wide_b[:2, :150, 56:], sa, sb),
        "every_second": (wide_a[::2, ::2, :200], wide_b[::2, ::2, :200], sa, sb),
        "heads_outside": (torch.randn(2, 6, 200).to(FP8).transpose(0, 1), b, sa, sb),
        "expanded": (a[:1].expand(6, 2, 200), b[:1].expand(2, 150, 200), sa, sb),
        "scales_any": (a, b, torch.rand(2, 2, 8).permute(2, 1, 0)[:6], torch.rand(2, 2, 2).mT),
    }


@pytest.mark.parametrize("case", list(strided_cases()))
def test_strided_inputs(case, assert_right):
    assert_right(*strided_cases()[case], torch.float32)


def test_largest_subnormal_and_zero_operands_do_not_lose_bits():
    x = torch.tensor([[448.0] * 256, [2.0**-9] * 256, [0.0] * 256])
    a = torch.stack([x, -x], dim=1).to(FP8)
    b, ones = torch.stack([x, x]).to(FP8), torch.ones(3, 2, 2)
    out = fp8_bmm(a, b, ones, torch.ones(2, 1, 2), torch.float32)
    # 448 is a power of two times 7: products and sums are exact in float32.
    big, mixed, small = 256 * 448.0**2, 256 * 448 * 2.0**-9, 256 * 2.0**-18
    assert out[:, 0].tolist() == [[big, mixed, 0], [mixed, small, 0], [0, 0, 0]]
    assert torch.equal(out[:, 1], -out[:, 0])


def test_nan_stays_in_its_token_and_head():
    a, b, sa, sb = operands(3, 2, 131, 140)
    a.view(torch.uint8)[1, 0, 7] = 0x7F
    b.view(torch.uint8)[1, 130, 139] = 0xFF
    is_nan = torch.zeros(3, 2, 131, dtype=torch.bool)
    is_nan[1, 0], is_nan[:, 1, 130] = True, True
    assert torch.equal(fp8_bmm(a, b, sa, sb).isnan(), is_nan)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 2, 130, 257), (0, 3, 5, 130)], ids=str)
def test_opcheck(shape, opcheck):
    b, h, _, r = shape
    _, w, sa, sb = operands(*shape)
    opcheck(OP, (torch.randn(b, h, r + 3).to(FP8)[..., :r], w, sa, sb, torch.bfloat16))


class Absorbed(nn.Module):
    def __init__(self, h: int, d: int, r: int) -> None:
        super().__init__()
        _, weight, _, scale = operands(0, h, d, r)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, a: Tensor, scale_a: Tensor) -> Tensor:
        return fp8_bmm(a, self.weight, scale_a, self.scale)


def test_under_compile_with_a_dynamic_m():
    model = Absorbed(3, 130, 200)
    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    with torch.no_grad():
        for m in (5, 2, 17):
            args = (torch.randn(m, 3, 200).to(FP8), torch.rand(m, 3, 2))
            for x in args:  # an error if anything guards on M
                torch._dynamo.mark_dynamic(x, 0, min=2, max=512)
            assert torch.equal(compiled(*args), model(*args))
    report = compile_ext.explain(compiled)
    [row] = report.rows
    assert report.graphs == 1
    assert row.site is not None
    assert (row.module, row.decisions) == ("weight", ())  # the heads' weights stay as they are
    assert (row.site.m, row.site.n, row.site.k) == ((2, 512), 130, 200)
    assert row.site.scales == ("mx3x2", "3x2x2")


def valid() -> dict[str, Any]:
    return {
        "a": fp8(4, 2, 200),
        "b": fp8(2, 300, 200),
        "scale_a": torch.ones(4, 2, 2),
        "scale_b": torch.ones(2, 3, 2),
        "out_dtype": torch.bfloat16,
    }


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "a_bf16": ("a", torch.ones(4, 2, 200).bfloat16(), DtypeError, "a of bfloat16", "float8_e4m3"),
    "b_bf16": ("b", torch.ones(2, 300, 200).bfloat16(), DtypeError, "b of bfloat16", "float8"),
    "scale_a_fp64": ("scale_a", torch.ones(4, 2, 2).double(), DtypeError, "float64", "float32"),
    "scale_b_fp16": ("scale_b", torch.ones(2, 3, 2).half(), DtypeError, "float16", "float32"),
    "out_fp8": (
        "out_dtype", FP8, DtypeError, "out_dtype torch.float8", "float16", "leave out_dtype out"),
    "a_rank_2": ("a", fp8(4, 200), RankError, "a of shape [4, 200]", "3 dim", "a as [b, h, r]"),
    "b_rank_2": ("b", fp8(300, 200), RankError, "[300, 200]", "3 dimensions", "b as [h, d, r]"),
    "other_r": (
        "b", fp8(2, 300, 199), ShapeError, "a [4, 2, 200] and b [2, 300, 199]",
        "a [b, h, r] and b [h, d, r] with one r", "pass b as [h, d, r], untransposed"),
    "other_h": (
        "b", fp8(4, 300, 200), ShapeError, "a [4, 2, 200] and b [4, 300, 200]",
        "a [b, h, r] and b [h, d, r] with one h", "pass b as [h, d, r], untransposed"),
    "scale_a_one": ("scale_a", torch.ones(4, 2, 1), ShapeError, "[4, 2, 1]", "[4, 2, 2]"),
    "scale_a_swapped": ("scale_a", torch.ones(2, 4, 2), ShapeError, "[2, 4, 2]", "[4, 2, 2]"),
    "scale_b_flat": ("scale_b", torch.ones(3, 2), ShapeError, "of shape [3, 2]", "[2, 3, 2]"),
    "a_transposed": ("a", fp8(4, 200, 2).mT, LayoutError, ", 1, 2]", "stride 1 in the last"),
    "b_every_second": ("b", fp8(2, 300, 400)[..., ::2], LayoutError, "400, 2]", "stride 1 in"),
    "b_meta": ("b", fp8(2, 300, 200).to("meta"), DeviceError, "b on meta and a on cpu", "one dev"),
    "scale_a_meta": (
        "scale_a", torch.ones(4, 2, 2, device="meta"), DeviceError, "scale_a on meta", "one dev"),
    "scale_b_meta": (
        "scale_b", torch.ones(2, 3, 2, device="meta"), DeviceError, "scale_b on meta", "one dev"),
    "scale_b_grad": (
        "scale_b", torch.ones(2, 3, 2).requires_grad_(), GradError, "that requires", "gradient"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, assert_refused):
    assert_refused(fp8_bmm, valid(), BAD[case])


def test_the_valid_call_of_the_refusals_is_valid():
    assert torch.equal(fp8_bmm(**valid()), torch.full((4, 2, 300), 200.0).bfloat16())
