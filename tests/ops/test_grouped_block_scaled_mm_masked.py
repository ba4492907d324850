"""grouped_block_scaled_mm_masked against a float64 oracle; rows out of use; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext.ops import grouped_block_scaled_mm_masked
from compile_ext.ops.errors import (
    DeviceError,
    DtypeError,
    GradError,
    LayoutError,
    RankError,
    ShapeError,
)
from compile_ext.ops.grouped_block_scaled_mm_masked import grouped_block_scaled_mm_masked_ref

FP8 = torch.float8_e4m3fn
OP = torch.ops.compile_ext.grouped_block_scaled_mm_masked.default
BIGGEST = 2**31 - 1
SHAPES = [  # g, m_max, n, k: one group, no rows, no groups, partial blocks
    (1, 5, 7, 130),
    (3, 0, 5, 130),
    (0, 3, 5, 130),
    (2, 33, 128, 128),
    (3, 9, 257, 1),
    (5, 4, 300, 257),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def cover(size: int) -> int:
    return -(-size // 128)


def fp8(*shape: int) -> Tensor:
    return torch.ones(shape).to(FP8)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def operands(g: int, m: int, n: int, k: int) -> Operands:
    a, b = torch.randn(g, m, k).to(FP8), torch.randn(g, n, k).to(FP8)
    return a, b, torch.rand(g, m, cover(k)) + 0.5, torch.rand(g, cover(n), cover(k)) / 8 + 0.01


@pytest.fixture
def assert_right(dequantize64, assert_gemm_close):
    """The op's result for these arguments is the formula's, in float64, and 0 out of use."""

    def check(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, used: Tensor, dtype: Any) -> Tensor:
        x, w = dequantize64(a, sa, 1), dequantize64(b, sb, 128)
        for group, rows in enumerate(used.tolist()):
            x[group, max(rows, 0) :] = 0
        out = grouped_block_scaled_mm_masked(a, b, sa, sb, used, 3, dtype)
        assert out.dtype == dtype
        assert_gemm_close(out, x @ w.mT, x.abs() @ w.abs().mT, a.shape[2])
        return out

    return check


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows(shape, out_dtype, assert_right):
    g, m, _, _ = shape
    assert_right(*operands(*shape), torch.randint(0, m + 1, (g,), dtype=torch.int32), out_dtype)


@pytest.mark.parametrize("used", [0, -1, -BIGGEST - 1], ids=str)
def test_no_rows_in_use(used, assert_right):
    args = operands(3, 4, 130, 140)
    out = assert_right(*args, int32(2, used, 4), torch.bfloat16)
    assert out[1].count_nonzero() == 0


@pytest.mark.parametrize("used", [4, 5, BIGGEST], ids=str)
def test_more_rows_than_there_are_count_as_all(used, assert_right):
    args = operands(2, 4, 130, 140)
    out = assert_right(*args, int32(used, 1), torch.float32)
    assert torch.equal(out, grouped_block_scaled_mm_masked(*args, int32(4, 1), 3, torch.float32))


def test_nan_out_of_use_reaches_nothing(assert_right):
    a, b, sa, sb = operands(2, 4, 130, 140)
    used = int32(2, 0)
    want = grouped_block_scaled_mm_masked(a, b, sa, sb, used, 3)
    a.view(torch.uint8)[0, 2:] = 0x7F
    sa[0, 3] = torch.inf
    b.view(torch.uint8)[1] = 0xFF
    assert torch.equal(grouped_block_scaled_mm_masked(a, b, sa, sb, used, 3), want)


def test_nan_in_a_weight_stays_in_its_group():
    a, b, sa, sb = operands(3, 4, 131, 140)
    b.view(torch.uint8)[1] = 0x7F
    out = grouped_block_scaled_mm_masked(a, b, sa, sb, int32(4, 4, 4), 3)
    assert out.isfinite().all(dim=(1, 2)).tolist() == [True, False, True]


@pytest.mark.parametrize("expected", [1, 2, 4, 128, BIGGEST], ids=str)
def test_the_hint_changes_nothing(expected):
    args = (*operands(2, 4, 130, 140), int32(1, 4))
    want = grouped_block_scaled_mm_masked(*args, 3)
    assert torch.equal(grouped_block_scaled_mm_masked(*args, expected, torch.bfloat16), want)


def test_largest_subnormal_and_zero_operands_do_not_lose_bits():
    x = torch.tensor([[448.0] * 256, [2.0**-9] * 256, [0.0] * 256])
    a, ones = torch.stack([x, -x]).to(FP8), torch.ones(2, 3, 2)
    b = torch.stack([x, x]).to(FP8)
    used = int32(3, 3)
    out = grouped_block_scaled_mm_masked(a, b, ones, ones[:, :1], used, 3, torch.float32)
    # 448 is a power of two times 7: products and sums are exact in float32.
    big, mixed, small = 256 * 448.0**2, 256 * 448 * 2.0**-9, 256 * 2.0**-18
    assert out[0].tolist() == [[big, mixed, 0], [mixed, small, 0], [0, 0, 0]]
    assert torch.equal(out[1], -out[0])


def strided_cases() -> dict[str, tuple[Operands, Tensor]]:
    """Operands that are views: (a [2, 6, 200], b [2, 150, 200], scales), masked_m."""
    a, b, sa, sb = operands(2, 6, 150, 200)
    wide_a, wide_b = torch.randn(4, 12, 256).to(FP8), torch.randn(4, 300, 256).to(FP8)
    used = int32(4, 6)
    return {
        "columns_of_wider": ((wide_a[:2, :6, 3:203], wide_b[:2, :150, 56:], sa, sb), used),
        "every_second": ((wide_a[::2, ::2, :200], wide_b[::2, ::2, :200], sa, sb), used),
        "expanded": ((a[:1].expand(2, 6, 200), b[:, :1].expand(2, 150, 200), sa, sb), used),
        "groups_inside": ((torch.randn(6, 2, 200).to(FP8).transpose(0, 1), b, sa, sb), used),
        # One matrix of scales a group, column-major with padded columns, as TMA reads them.
        "scales_any": ((a, b, torch.rand(2, 2, 8).mT[:, :6], torch.rand(2, 2, 2).mT), used),
        "used_strided": ((a, b, sa, sb), int32(4, 9, 6, 9)[::2]),
        "used_expanded": ((a, b, sa, sb), int32(4).expand(2)),
    }


@pytest.mark.parametrize("case", list(strided_cases()))
def test_strided_inputs(case, assert_right):
    args, used = strided_cases()[case]
    assert_right(*args, used, torch.float32)


def test_the_host_waits_for_no_value(run_without_values):
    args = (*operands(3, 6, 130, 140), int32(0, 9, 2), 4)
    out = run_without_values(grouped_block_scaled_mm_masked_ref, *args, torch.bfloat16)
    assert out.shape == (3, 6, 130)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 130, 257), (3, 0, 5, 130)], ids=str)
def test_opcheck(shape, opcheck):
    g, m, _, k = shape
    _, b, sa, sb = operands(*shape)
    a = torch.randn(g, m, k + 3).to(FP8)[..., :k]
    used = torch.randint(-1, m + 2, (g,), dtype=torch.int32)
    opcheck(OP, (a, b, sa, sb, used, 4, torch.bfloat16))


class Experts(nn.Module):
    def __init__(self, g: int, n: int, k: int) -> None:
        super().__init__()
        _, weight, _, scale = operands(g, 0, n, k)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, a: Tensor, scale_a: Tensor, used: Tensor) -> Tensor:
        expected = a.shape[1] // 2 + 1  # a hint that comes from M
        return grouped_block_scaled_mm_masked(a, self.weight, scale_a, self.scale, used, expected)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_under_compile_with_a_dynamic_m(inner):
    model = Experts(3, 130, 200)
    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": inner})
    with torch.no_grad():
        for m in (5, 2, 17):
            args = (torch.randn(3, m, 200).to(FP8), torch.rand(3, m, 2), int32(0, 1, 99))
            for x in args[:2]:  # an error if anything guards on M
                torch._dynamo.mark_dynamic(x, 1, min=2, max=512)
            assert torch.equal(compiled(*args), model(*args))
    report = compile_ext.explain(compiled)
    [row] = report.rows
    assert report.graphs == 1
    assert row.site is not None
    assert (row.module, row.decisions) == ("weight", ())  # an experts tensor is left as it is
    assert (row.site.m, row.site.n, row.site.k) == ((2, 512), 130, 200)
    assert row.site.scales == ("3xmx2", "3x2x2")


def test_a_hint_from_m_that_is_too_small_is_refused_when_the_op_runs():
    def call(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, used: Tensor) -> Tensor:
        return grouped_block_scaled_mm_masked(a, b, sa, sb, used, a.shape[1] // 4)

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for m in (5, 9):
        args = (*operands(2, m, 5, 130), int32(1, 2))
        assert torch.equal(compiled(*args), call(*args))
    with pytest.raises(ShapeError, match="found expected_m = 0; wanted at least 1"):
        compiled(*operands(2, 3, 5, 130), int32(1, 2))


def valid() -> dict[str, Any]:
    return {
        "a": fp8(2, 4, 200),
        "b": fp8(2, 300, 200),
        "scale_a": torch.ones(2, 4, 2),
        "scale_b": torch.ones(2, 3, 2),
        "masked_m": int32(1, 4),
        "expected_m": 2,
        "out_dtype": torch.bfloat16,
    }


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "a_bf16": ("a", torch.ones(2, 4, 200).bfloat16(), DtypeError, "a of bfloat16", "float8_e4m3"),
    "b_bf16": ("b", torch.ones(2, 300, 200).bfloat16(), DtypeError, "b of bfloat16", "float8"),
    "scale_a_fp64": ("scale_a", torch.ones(2, 4, 2).double(), DtypeError, "float64", "float32"),
    "scale_b_fp16": ("scale_b", torch.ones(2, 3, 2).half(), DtypeError, "float16", "float32"),
    "used_int64": ("masked_m", int32(1, 4).long(), DtypeError, "masked_m of int64", "int32"),
    "out_fp8": (
        "out_dtype", FP8, DtypeError, "out_dtype torch.float8", "float16", "leave out_dtype out"),
    "a_rank_2": ("a", fp8(4, 200), RankError, "a of shape [4, 200]", "3 dim", "a as [g, m, k]"),
    "b_rank_2": ("b", fp8(300, 200), RankError, "[300, 200]", "3 dimensions", "b as [g, n, k]"),
    "other_k": (
        "b", fp8(2, 300, 199), ShapeError, "a [2, 4, 200] and b [2, 300, 199]",
        "a [g, m, k] and b [g, n, k] with one k", "pass b as [g, n, k], untransposed"),
    "other_g": (
        "b", fp8(3, 300, 200), ShapeError, "a [2, 4, 200] and b [3, 300, 200]",
        "a [g, m, k] and b [g, n, k] with one g", "pass b as [g, n, k], untransposed"),
    "scale_a_one": ("scale_a", torch.ones(2, 4, 1), ShapeError, "[2, 4, 1]", "[2, 4, 2]"),
    "scale_a_flat": ("scale_a", torch.ones(8, 2), ShapeError, "of shape [8, 2]", "[2, 4, 2]"),
    "scale_b_flat": ("scale_b", torch.ones(3, 2), ShapeError, "of shape [3, 2]", "[2, 3, 2]"),
    "used_long": ("masked_m", int32(0, 1, 2), ShapeError, "masked_m of shape [3]", "[2]"),
    "expected_0": ("expected_m", 0, ShapeError, "expected_m = 0", "at least 1", "or m_max"),
    "expected_-1": ("expected_m", -1, ShapeError, "expected_m = -1", "at least 1", "or m_max"),
    "a_transposed": ("a", fp8(2, 200, 4).mT, LayoutError, ", 1, 4]", "stride 1 in the last"),
    "b_every_second": ("b", fp8(2, 300, 400)[..., ::2], LayoutError, "400, 2]", "stride 1 in"),
    "b_meta": ("b", fp8(2, 300, 200).to("meta"), DeviceError, "b on meta and a on cpu", "one dev"),
    "scale_a_meta": (
        "scale_a", torch.ones(2, 4, 2, device="meta"), DeviceError, "scale_a on meta", "one dev"),
    "used_meta": ("masked_m", int32(1, 4).to("meta"), DeviceError, "masked_m on meta", "one dev"),
    "scale_a_grad": (
        "scale_a", torch.ones(2, 4, 2).requires_grad_(), GradError, "that requires", "gradient"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, assert_refused):
    assert_refused(grouped_block_scaled_mm_masked, valid(), BAD[case])


def test_the_valid_call_of_the_refusals_is_valid():
    out = grouped_block_scaled_mm_masked(**valid())
    assert torch.equal(out[0, 0], torch.full((300,), 200.0).bfloat16())
    assert out.count_nonzero(dim=2).tolist() == [[300, 0, 0, 0], [300] * 4]
