"""The FP8 quantizations and their inverses: scales, error bounds, partial groups, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from compile_ext.ops import (
    dequantize_fp8_blocks,
    dequantize_fp8_groups,
    quantize_fp8_blocks,
    quantize_fp8_groups,
    quantize_fp8_per_token,
)
from compile_ext.ops.errors import DtypeError, RankError, ShapeError
from compile_ext.ops.quantize import blocks_of, fp8_to_float32

FP8 = torch.float8_e4m3fn
QUANTIZERS = {  # function, rows and columns that share a scale
    "per_token": (quantize_fp8_per_token, 1, 10**6),
    "groups": (quantize_fp8_groups, 1, 128),
    "blocks": (quantize_fp8_blocks, 128, 128),
}
SHAPES = [(0, 130), (1, 1), (1, 128), (3, 5), (5, 129), (4, 300), (130, 127), (257, 256), (129, 1)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def data(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    # Magnitudes over three decades within a row, so that small values meet the subnormal codes.
    return (torch.randn(shape) * torch.logspace(-2, 1, shape[1])).to(dtype)


def spread(scale: Tensor, shape: tuple[int, int], rows: int, columns: int) -> Tensor:
    """The scale of each element, by index: independent of how the package repeats scales."""
    m, k = shape
    return scale.double()[torch.arange(m) // rows][:, torch.arange(k) // columns]


@each_quantizer
@each_shape
@each_dtype
def test_round_trip_stays_within_half_a_step(name, shape, dtype):
    quantize, rows, columns = QUANTIZERS[name]
    x = data(shape, dtype)
    q, scale = quantize(x)
    assert (q.dtype, q.shape, scale.dtype) == (FP8, x.shape, torch.float32)
    assert q.is_contiguous()
    step = spread(scale, shape, rows, columns)
    error = (q.double() * step - x.double()).abs()
    # e4m3 has 3 mantissa bits: half a step is 2^-4 of the value. Below 2^-6 the codes are
    # subnormal, 2^-9 apart: half a step is 2^-10 scales. The float32 rounding of the scale and of
    # the quotient, 2^-24 each, fits into 2^-4, which only a value on a power of two would reach.
    bound = torch.maximum(x.double().abs() * 2.0**-4, step * 2.0**-10 * (1 + 2.0**-22))
    assert (error <= bound).all()


@each_quantizer
@each_shape
def test_scale_is_amax_of_its_own_group_over_448(name, shape):
    quantize, rows, columns = QUANTIZERS[name]
    x = data(shape)
    q, scale = quantize(x)
    expected = [
        [part.abs().max() / 448 for part in band.split(columns, dim=1)]
        for band in x.split(rows)
        if band.numel()
    ]
    assert scale.shape == (-(-shape[0] // rows), max(1, -(-shape[1] // columns)))
    if shape[0]:
        assert torch.equal(scale, torch.tensor(expected))
        # The largest element of a group uses the whole range.
        tops = [
            part.double().abs().max()
            for band in q.split(rows)
            for part in band.double().split(columns, dim=1)
        ]
        assert tops == [448.0] * len(tops)


@each_quantizer
def test_values_that_e4m3_holds_come_back_exactly(name):
    quantize, rows, columns = QUANTIZERS[name]
    # All finite codes times a power of two, which 448 * 2^-5 = 14 in each group makes the scale.
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).view(FP8)
    x = torch.full((130, 256), 14.0)
    x[:, :127], x[:, 128:255] = codes.float()[:127] / 32, codes.float()[127:] / 32
    q, scale = quantize(x)
    assert torch.equal(scale, torch.full_like(scale, 2.0**-5))
    assert torch.equal(q.double() * spread(scale, (130, 256), rows, columns), x.double())


@each_quantizer
def test_signs_and_saturation(name):
    quantize, _, _ = QUANTIZERS[name]
    # Sweep the rounding of amax / scale: no largest element may fall off the range as NaN.
    top = torch.linspace(0.1, 1000, 20001).reshape(-1, 1)
    q, _ = quantize(torch.cat([top, -top], dim=1)) if name != "blocks" else quantize(top)
    assert not q.float().isnan().any()
    if name != "blocks":
        assert q.float().unique().tolist() == [-448.0, 448.0]


@each_quantizer
def test_zero_groups_give_zeros(name):
    quantize, _, _ = QUANTIZERS[name]
    x = torch.zeros(130, 260)
    x[129, 259] = 3.0
    q, scale = quantize(x)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert torch.equal(q.float() != 0, x != 0)
    assert not q.float().isnan().any()


@each_quantizer
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_nan_and_infinity_spoil_their_group_and_no_other(name, bad):
    quantize, rows, columns = QUANTIZERS[name]
    x = data((130, 260))
    x[129, 259] = bad
    q, scale = quantize(x)
    back = q.double() * spread(scale, (130, 260), rows, columns)
    bands, groups = torch.arange(130) // rows, torch.arange(260) // columns
    spoiled = (bands == bands[-1]).unsqueeze(1) & (groups == groups[-1])
    assert torch.equal(back.isnan(), spoiled)


@each_quantizer
def test_subnormal_input_does_not_divide_by_zero(name):
    quantize, _, _ = QUANTIZERS[name]
    q, scale = quantize(torch.full((2, 3), 1e-40))
    assert torch.equal(q.float(), torch.zeros(2, 3))
    assert (scale > 0).all()


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 8, 130])
def test_group_scales_are_column_major_with_16_byte_columns(m):
    _, scale = quantize_fp8_groups(data((m, 300)))
    assert scale.shape == (m, 3)
    assert scale.stride() == (1, (m + 3) // 4 * 4)
    assert scale.stride(1) * scale.element_size() % 16 == 0  # what a TMA descriptor can address
    assert scale.data_ptr() % 16 == 0


@each_quantizer
def test_strided_input_gives_the_same(name):
    quantize, _, _ = QUANTIZERS[name]
    wide = data((140, 300))
    for x in (wide[::2, 5:205], wide.T[:200], wide[:1].expand(9, 300)):
        for got, want in zip(quantize(x), quantize(x.contiguous()), strict=True):
            assert torch.equal(got.float(), want.float())
            assert got.stride() == want.stride()


@each_shape
def test_dequantize_is_the_product_with_each_scale(shape):
    x = data(shape)
    for quantize, dequantize, rows in (
        (quantize_fp8_groups, dequantize_fp8_groups, 1),
        (quantize_fp8_blocks, dequantize_fp8_blocks, 128),
    ):
        q, scale = quantize(x)
        back = dequantize(q, scale)
        # One float32 product an element.
        assert torch.equal(back, q.float() * spread(scale, shape, rows, 128).float())


@pytest.mark.parametrize("layout", ["flat", "square", "transposed", "every_second", "empty"])
def test_fp8_to_float32_equals_pytorch_on_all_codes(layout):
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    q = {
        "flat": codes,
        "square": codes.view(16, 16),
        "transposed": codes.view(16, 16).T,
        "every_second": codes.view(4, 4, 16)[:, 1::2, ::3],
        "empty": codes[:0].view(0, 5),
    }[layout]
    out = fp8_to_float32(q)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, q.float(), rtol=0, atol=0, equal_nan=True)
    if layout == "flat":
        assert out.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
        assert out[[0x7E, 0xFE, 0x01]].tolist() == [448.0, -448.0, 2.0**-9]
        assert torch.signbit(out[0x80])


@pytest.mark.parametrize(("size", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2)])
def test_blocks_of(size, blocks):
    assert blocks_of(size) == blocks


@each_quantizer
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_to_one_graph_with_the_same_bits(name, dynamic):
    quantize, _, _ = QUANTIZERS[name]
    compiled = torch.compile(quantize, backend="eager", fullgraph=True, dynamic=dynamic)
    for m in (3, 6):
        x = data((m, 200), torch.bfloat16)
        for got, want in zip(compiled(x), quantize(x), strict=True):
            assert torch.equal(got.float(), want.float())
            assert got.stride() == want.stride()


@each_quantizer
@pytest.mark.parametrize(
    ("x", "error", "found", "wanted"),
    [
        (torch.ones(2, 3).int(), DtypeError, "of int32", "bfloat16 or float16 or float32"),
        (torch.ones(2, 3).double(), DtypeError, "of float64", "bfloat16 or float16 or float32"),
        (torch.ones(2, 3).to(FP8), DtypeError, "of float8_e4m3fn", "bfloat16 or float16"),
        (torch.ones(3), RankError, "of shape [3]", "2 dimensions"),
        (torch.ones(1, 2, 3), RankError, "of shape [1, 2, 3]", "2 dimensions"),
    ],
    ids=["int32", "float64", "fp8", "rank_1", "rank_3"],
)
def test_quantizers_refuse(name, x, error, found, wanted):
    quantize, _, _ = QUANTIZERS[name]
    # A graph break leads to eager code, which raises our own error.
    for call in (quantize, torch.compile(quantize, backend="eager")):
        with pytest.raises(error) as raised:
            call(x)
        assert raised.value.where == quantize.__name__
        assert found in raised.value.found
        assert wanted in raised.value.wanted
        assert raised.value.fix


@pytest.mark.parametrize(
    ("quantize", "dequantize"),
    [(quantize_fp8_groups, dequantize_fp8_groups), (quantize_fp8_blocks, dequantize_fp8_blocks)],
)
def test_dequantizers_take_batches(quantize, dequantize):
    pairs = [quantize(torch.randn(130, 200)) for _ in range(6)]
    q, scale = (torch.stack(x).unflatten(0, (2, 3)) for x in zip(*pairs, strict=True))
    want = torch.stack([dequantize(*pair) for pair in pairs]).unflatten(0, (2, 3))
    assert torch.equal(dequantize(q, scale), want)
    with pytest.raises(ShapeError, match=r"wanted \[2, 3, (130|2), 2\]"):
        dequantize(q, scale[:, :1])


@pytest.mark.parametrize("dequantize", [dequantize_fp8_groups, dequantize_fp8_blocks])
def test_dequantizers_refuse(dequantize):
    q = torch.ones(130, 200).to(FP8)
    with pytest.raises(DtypeError, match="found q of bfloat16; wanted float8_e4m3fn"):
        dequantize(q.bfloat16(), torch.ones(1, 1))
    with pytest.raises(ShapeError, match=r"found scale of shape \[2, 3\]; wanted \[(130|2), 2\]"):
        dequantize(q, torch.ones(2, 3))


@each_quantizer
def test_refusal_reaches_the_user_with_fullgraph(name):
    quantize, _, _ = QUANTIZERS[name]
    with pytest.raises(TorchDynamoException, match="bfloat16 or float16"):
        torch.compile(quantize, backend="eager", fullgraph=True)(torch.ones(2, 3).int())


def test_per_token_of_no_features():
    q, scale = quantize_fp8_per_token(torch.empty(3, 0))
    assert q.shape == (3, 0)
    assert scale.tolist() == [[scale[0, 0].item()]] * 3
    assert scale[0, 0] > 0


@pytest.mark.parametrize("k", [1, 130, 136, 144, 256, 300])
def test_groups_under_inductor_are_eagers(k: int) -> None:
    """torch 2.13's C++ left out the last k % 128 columns of a plainer spelling."""
    x = torch.randn(5, k).bfloat16()
    q, scale = torch.compile(quantize_fp8_groups)(x)
    want_q, want_scale = quantize_fp8_groups(x)
    assert torch.equal(q.view(torch.uint8), want_q.view(torch.uint8))
    assert torch.equal(scale, want_scale)
