"""grouped_block_scaled_mm against a float64 oracle; rows without a group; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext.ops import grouped_block_scaled_mm, quantize_fp8_blocks
from compile_ext.ops.errors import (
    DeviceError,
    DtypeError,
    GradError,
    LayoutError,
    RankError,
    ShapeError,
)
from compile_ext.ops.grouped_block_scaled_mm import grouped_block_scaled_mm_ref

FP8 = torch.float8_e4m3fn
OP = torch.ops.compile_ext.grouped_block_scaled_mm.default
BIGGEST = 2**31 - 1
SHAPES = [  # g, m, n, k: one group, no rows, no groups, partial blocks, more groups than rows
    (1, 5, 7, 130),
    (3, 0, 5, 130),
    (0, 3, 5, 130),
    (2, 33, 128, 128),
    (3, 40, 257, 1),
    (9, 4, 300, 257),
    (4, 200, 130, 127),
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
    a, b = torch.randn(m, k).to(FP8), torch.randn(g, n, k).to(FP8)
    return a, b, torch.rand(m, cover(k)) + 0.5, torch.rand(g, cover(n), cover(k)) / 8 + 0.01


@pytest.fixture
def assert_right(dequantize64, assert_gemm_close):
    """The op's result for these arguments is the formula's, in float64."""

    def check(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, rows: Tensor, dtype: Any) -> Tensor:
        x, w = dequantize64(a, sa, 1), dequantize64(b, sb, 128)
        exact = magnitude = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
        for group, weight in enumerate(w):
            mine = (rows == group).unsqueeze(1)
            exact = torch.where(mine, x @ weight.T, exact)
            magnitude = torch.where(mine, x.abs() @ weight.abs().T, magnitude)
        out = grouped_block_scaled_mm(a, b, sa, sb, rows, dtype)
        assert out.dtype == dtype
        assert_gemm_close(out, exact, magnitude, a.shape[1])
        return out

    return check


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_group_for_any_row(shape, out_dtype, assert_right):
    g, m, _, _ = shape
    assert_right(*operands(*shape), torch.randint(-2, g + 2, (m,), dtype=torch.int32), out_dtype)


def test_the_layout_that_fast_kernels_take(assert_right):
    # Groups of 200, 0 and 128 rows, each from a multiple of 128 on, and a block without a group.
    rows = int32(*[0] * 200, *[-1] * 56, *[2] * 128, *[-1] * 128)
    out = assert_right(*operands(3, 512, 130, 200), rows, torch.bfloat16)
    assert out[200:256].count_nonzero() == out[384:].count_nonzero() == 0


@pytest.mark.parametrize("bad", [-1, -128, -BIGGEST - 1, 3, 4, 128, BIGGEST])
def test_an_index_without_a_group_gives_zero(bad, assert_right):
    a, b, sa, sb = operands(3, 4, 130, 140)
    a.view(torch.uint8)[1] = 0x7F  # NaN
    sa[2] = torch.inf
    out = grouped_block_scaled_mm(a, b, sa, sb, int32(0, bad, bad, 2), torch.float32)
    assert out.count_nonzero(dim=1).tolist() == [130, 0, 0, 130]
    clean, ones = fp8(4, 140), torch.ones(4, 2)
    assert_right(clean, b, ones, sb, int32(0, bad, bad, 2), torch.float32)


def test_nan_in_a_weight_stays_in_the_rows_of_its_group():
    a, b, sa, sb = operands(3, 5, 131, 140)
    b.view(torch.uint8)[1] = 0x7F
    sb[2] = torch.inf
    out = grouped_block_scaled_mm(a, b, sa, sb, int32(0, 1, 0, -1, 0))
    assert out.isfinite().all(dim=1).tolist() == [True, False, True, True, True]


def test_each_scale_acts_on_its_own_block_of_its_own_group_only():
    # Powers of two, one nonzero scale at a time: every value is exact, so the blocks show as such.
    a, b, rows = fp8(4, 300), fp8(2, 200, 300), int32(0, 1, 0, 1)
    for group in range(2):
        for row in range(2):
            for column, size in enumerate((128, 128, 44)):
                sa, sb = torch.ones(4, 3), torch.zeros(2, 2, 3)
                sb[group, row, column], sa[2:, column] = 2, 4
                out = grouped_block_scaled_mm(a, b, sa, sb, rows, torch.float32)
                expected = torch.zeros(4, 200)
                expected[group, 128 * row : 128 * row + 128] = 2.0 * size
                expected[2 + group, 128 * row : 128 * row + 128] = 8.0 * size
                assert torch.equal(out, expected)


def test_largest_subnormal_and_zero_operands_do_not_lose_bits():
    x = torch.tensor([[448.0] * 256, [2.0**-9] * 256, [0.0] * 256])
    a, b = x.to(FP8), torch.stack([x, -x]).to(FP8)
    ones = torch.ones(2, 1, 2)
    out = grouped_block_scaled_mm(a, b, torch.ones(3, 2), ones, int32(0, 1, 0), torch.float32)
    # 448 is a power of two times 7: products and sums are exact in float32.
    big, mixed, small = 256 * 448.0**2, 256 * 448 * 2.0**-9, 256 * 2.0**-18
    assert out.tolist() == [[big, mixed, 0], [-mixed, -small, 0], [0, 0, 0]]


def strided_cases() -> dict[str, tuple[Operands, Tensor]]:
    """Operands that are views: (a [6, 200], b [2, 150, 200], scales), m_indices."""
    a, b, sa, sb = operands(2, 6, 150, 200)
    wide_a, wide_b = torch.randn(12, 256).to(FP8), torch.randn(4, 300, 256).to(FP8)
    rows = int32(0, 1, 1, 0, -1, 1)
    return {
        "columns_of_wider": ((wide_a[:6, 3:203], wide_b[:2, :150, 56:], sa, sb), rows),
        "every_second": ((wide_a[::2, :200], wide_b[::2, ::2, :200], sa, sb), rows),
        "expanded": ((a[:1].expand(6, 200), b[:1].expand(2, 150, 200), sa, sb), rows),
        "groups_inside": ((a, b.transpose(0, 1).contiguous().transpose(0, 1), sa, sb), rows),
        # What quantize_fp8_groups returns: column-major with padded columns.
        "scales_any": ((a, b, torch.rand(2, 8).T[:6], torch.rand(2, 2, 2).mT), rows),
        "indices_strided": ((a, b, sa, sb), int32(0, 9, 1, 9, 1, 9, 0, 9, -1, 9, 1, 9)[::2]),
        "indices_expanded": ((a, b, sa, sb), int32(1).expand(6)),
    }


@pytest.mark.parametrize("case", list(strided_cases()))
def test_strided_inputs(case, assert_right):
    args, rows = strided_cases()[case]
    assert_right(*args, rows, torch.float32)


def test_the_default_output_is_bfloat16():
    args = (*operands(2, 3, 5, 130), int32(0, 1, -1))
    out = grouped_block_scaled_mm(*args)
    assert torch.equal(out, grouped_block_scaled_mm(*args, torch.bfloat16))


def test_the_host_waits_for_no_value(run_without_values):
    args = (*operands(3, 6, 130, 140), int32(0, 1, 2, -1, 0, 9))
    out = run_without_values(grouped_block_scaled_mm_ref, *args, torch.bfloat16)
    assert out.shape == (6, 130)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 130, 257), (3, 0, 5, 130)], ids=str)
def test_opcheck(shape, opcheck):
    g, m, _, k = shape
    _, b, sa, sb = operands(*shape)
    a = torch.randn(m, k + 3).to(FP8)[:, :k]
    rows = torch.randint(-1, g + 1, (m,), dtype=torch.int32)
    opcheck(OP, (a, b, sa, sb, rows, torch.bfloat16))


class Experts(nn.Module):
    def __init__(self, g: int, n: int, k: int) -> None:
        super().__init__()
        pairs = [quantize_fp8_blocks(torch.randn(n, k)) for _ in range(g)]
        weight, scale = (torch.stack(x) for x in zip(*pairs, strict=True))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, a: Tensor, scale_a: Tensor, rows: Tensor) -> Tensor:
        return grouped_block_scaled_mm(a, self.weight, scale_a, self.scale, rows)


def test_under_compile_with_a_dynamic_m():
    model, sizes = Experts(3, 130, 200), (5, 2, 17)
    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    with torch.no_grad():
        for m in sizes:
            a, scale_a = torch.randn(m, 200).to(FP8), torch.rand(m, 2)
            args = (a, scale_a, torch.arange(m, dtype=torch.int32) % 5 - 1)
            for x in args:  # an error if anything guards on M
                torch._dynamo.mark_dynamic(x, 0, min=2, max=512)
            assert torch.equal(compiled(*args), model(*args))
    report = compile_ext.explain(compiled)
    [row] = report.rows
    assert report.graphs == 1
    assert row.site is not None
    assert (row.module, row.decisions) == ("weight", ())  # an experts tensor is left as it is
    assert (row.site.m, row.site.n, row.site.k) == ((2, 512), 130, 200)
    assert row.site.scales == ("mx2", "3x2x2")


def valid() -> dict[str, Any]:
    return {
        "a": fp8(4, 200),
        "b": fp8(2, 300, 200),
        "scale_a": torch.ones(4, 2),
        "scale_b": torch.ones(2, 3, 2),
        "m_indices": int32(0, 1, -1, 2),
        "out_dtype": torch.bfloat16,
    }


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "a_bf16": ("a", torch.ones(4, 200).bfloat16(), DtypeError, "a of bfloat16", "float8_e4m3fn"),
    "b_bf16": ("b", torch.ones(2, 300, 200).bfloat16(), DtypeError, "b of bfloat16", "float8"),
    "scale_a_fp64": ("scale_a", torch.ones(4, 2).double(), DtypeError, "float64", "float32"),
    "scale_b_fp16": ("scale_b", torch.ones(2, 3, 2).half(), DtypeError, "float16", "float32"),
    "indices_int64": ("m_indices", torch.zeros(4).long(), DtypeError, "of int64", "int32"),
    "out_fp8": (
        "out_dtype", FP8, DtypeError, "out_dtype torch.float8", "float16", "leave out_dtype out"),
    "a_rank_3": ("a", fp8(1, 4, 200), RankError, "a of shape [1, 4, 200]", "2 dim", "a as [m, k]"),
    "b_rank_2": ("b", fp8(300, 200), RankError, "[300, 200]", "3 dimensions", "b as [g, n, k]"),
    "other_k": (
        "b", fp8(2, 300, 199), ShapeError, "a [4, 200] and b [2, 300, 199]",
        "a [m, k] and b [g, n, k] with one k", "pass b as [g, n, k], untransposed"),
    "scale_a_one": ("scale_a", torch.ones(4, 1), ShapeError, "scale_a of shape [4, 1]", "[4, 2]"),
    "scale_b_flat": ("scale_b", torch.ones(3, 2), ShapeError, "of shape [3, 2]", "[2, 3, 2]"),
    "scale_b_floor": ("scale_b", torch.ones(2, 2, 1), ShapeError, "[2, 2, 1]", "[2, 3, 2]"),
    "indices_short": ("m_indices", int32(0, 1), ShapeError, "m_indices of shape [2]", "[4]"),
    "indices_2d": ("m_indices", int32(0, 1, 1, 1)[None], ShapeError, "of shape [1, 4]", "[4]"),
    "a_transposed": ("a", fp8(200, 4).T, LayoutError, "strides [1, 4]", "stride 1 in the last"),
    "b_every_second": ("b", fp8(2, 300, 400)[..., ::2], LayoutError, "400, 2]", "stride 1 in"),
    "b_meta": ("b", fp8(2, 300, 200).to("meta"), DeviceError, "b on meta and a on cpu", "one dev"),
    "scale_a_meta": (
        "scale_a", torch.ones(4, 2, device="meta"), DeviceError, "scale_a on meta", "one device"),
    "scale_b_meta": (
        "scale_b", torch.ones(2, 3, 2, device="meta"), DeviceError, "scale_b on meta", "one dev"),
    "indices_meta": (
        "m_indices", int32(0, 1, 1, 1).to("meta"), DeviceError, "m_indices on meta", "one device"),
    "scale_b_grad": (
        "scale_b", torch.ones(2, 3, 2).requires_grad_(), GradError, "that requires", "gradient"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, assert_refused):
    assert_refused(grouped_block_scaled_mm, valid(), BAD[case])


def test_the_valid_call_of_the_refusals_is_valid():
    out = grouped_block_scaled_mm(**valid())
    assert torch.equal(out[:2], torch.full((2, 300), 200.0).bfloat16())
    assert out[2:].count_nonzero() == 0
