"""Scales that are powers of two: as float8_e8m0fnu, and as quantization rounds them up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import compile_ext
from compile_ext.layers import BlockFp8Linear
from compile_ext.ops import (
    add_rms_norm_quantize_fp8,
    block_scaled_mm,
    block_scaled_mm_aten,
    block_scaled_mm_deep_gemm,
    dequantize_fp8_blocks,
    dequantize_fp8_groups,
    fp8_bmm,
    grouped_block_scaled_mm,
    grouped_block_scaled_mm_masked,
    quantize_fp8_blocks,
    quantize_fp8_groups,
    rms_norm_quantize_fp8,
    ue8m0,
)
from compile_ext.ops.define import definition_of
from compile_ext.ops.errors import DtypeError, ShapeError
from compile_ext.ops.quantize import AMAX_FLOOR, FP8_MAX
from compile_ext.passes.derivation import Padding

FP8, E8M0, BF16 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16
OPS = torch.ops.compile_ext
NAN, INF = float("nan"), float("inf")


def e8m0(*shape: int) -> Tensor:
    """Scales from 2^-7 to 2^4."""
    return torch.randint(120, 132, shape, dtype=torch.uint8).view(E8M0)


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(FP8)


def test_every_byte_dequantizes_exactly() -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(E8M0)
    q = torch.ones(256, 1).to(FP8)
    want = [2.0 ** (byte - 127) for byte in range(255)]
    for got in (
        dequantize_fp8_groups(q, scale[:, None]),
        dequantize_fp8_blocks(q.view(256, 1, 1), scale.view(256, 1, 1)),
    ):
        assert got.dtype == torch.float32
        assert got.flatten()[:255].tolist() == want
        assert bool(got[255].isnan().all())


def test_rounds_up_to_powers_of_two() -> None:
    powers = torch.tensor([2.0**e for e in range(-126, 127)])
    above = torch.nextafter(powers, torch.tensor(INF))
    below = torch.nextafter(powers[1:], torch.tensor(0.0))  # of 2^-126 it is a subnormal
    assert torch.equal(ue8m0.round_up(powers), powers)
    assert torch.equal(ue8m0.round_up(above), powers * 2)
    assert torch.equal(ue8m0.round_up(below), powers[1:])
    special = ue8m0.round_up(torch.tensor([INF, NAN]))
    assert special[0] == INF
    assert special[1].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 129), (130, 300), (0, 130)], ids=str)
def test_quantizes_with_powers_of_two(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * torch.logspace(-2, 1, shape[1])).to(dtype)
    for quantize in (quantize_fp8_groups, quantize_fp8_blocks):
        fine, coarse = quantize(x), quantize(x, use_ue8m0=True)
        scale = coarse[1]
        assert scale.dtype == torch.float32
        assert scale.stride() == fine[1].stride()
        assert torch.equal(scale.to(E8M0).float(), scale)  # a power of two
        assert bool(((scale >= fine[1]) & (scale < 2 * fine[1])).all())
        wide = dequantize_fp8_groups if quantize is quantize_fp8_groups else dequantize_fp8_blocks
        each = wide(torch.ones(shape).to(FP8), scale)
        # Half a step of 3 bits of mantissa, or of the subnormals, 2^-9 apart. To divide by a power
        # of two is exact.
        bound = torch.maximum(x.float().abs() * 2.0**-4, each * 2.0**-10)
        assert bool(((wide(coarse[0], scale) - x.float()).abs() <= bound).all())


def test_zeros_and_what_is_not_finite() -> None:
    x = torch.zeros(3, 128)
    x[1, 5], x[2, 7] = NAN, INF
    q, scale = quantize_fp8_groups(x, use_ue8m0=True)
    smallest = AMAX_FLOOR / FP8_MAX
    assert smallest <= scale[0, 0] < 2 * smallest
    assert bool((q[0].float() == 0).all())
    assert bool(dequantize_fp8_groups(q, scale)[1:].isnan().all())
    assert scale.to(E8M0).view(torch.uint8)[1:].tolist() == [[255], [255]]


def test_groups_under_inductor_are_eagers() -> None:
    x = torch.randn(5, 256) * torch.logspace(-3, 3, 256)
    q, scale = torch.compile(quantize_fp8_groups)(x, use_ue8m0=True)
    want, want_scale = quantize_fp8_groups(x, use_ue8m0=True)
    assert torch.equal(scale, want_scale)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))


GEMMS: dict[str, Any] = {  # function, a, b, scale_a, scale_b, the rest
    "dense": (block_scaled_mm, (5, 300), (150, 300), (5, 3), (2, 3), ()),
    "contiguous": (
        grouped_block_scaled_mm, (5, 300), (3, 150, 300), (5, 3), (3, 2, 3),
        (torch.tensor([0, 2, -1, 2, 0], dtype=torch.int32),)),
    "masked": (
        grouped_block_scaled_mm_masked, (3, 5, 300), (3, 150, 300), (3, 5, 3), (3, 2, 3),
        (torch.tensor([5, 5, 5], dtype=torch.int32), 5)),
    "bmm": (fp8_bmm, (5, 3, 300), (3, 150, 300), (5, 3, 3), (3, 2, 3), ()),
}  # fmt: skip


@pytest.mark.parametrize("case", GEMMS)
@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_gemms_give_the_bits_of_float32_scales(case: str, which: str) -> None:
    op, a, b, scale_a, scale_b, rest = GEMMS[case]
    operands, scales = (fp8(*a), fp8(*b)), [e8m0(*scale_a), e8m0(*scale_b)]
    mixed = [
        scale if which in (name, "both") else scale.float()
        for name, scale in zip("ab", scales, strict=True)
    ]
    want = op(*operands, *(scale.float() for scale in scales), *rest)
    assert torch.equal(op(*operands, *mixed, *rest), want)


@pytest.mark.parametrize("case", GEMMS)
def test_opcheck(case: str, opcheck: Any) -> None:
    op, a, b, scale_a, scale_b, rest = GEMMS[case]
    if case == "dense":
        rest = (None,)
    overload = getattr(OPS, op.__name__).default
    opcheck(overload, (fp8(*a), fp8(*b), e8m0(*scale_a), e8m0(*scale_b), *rest, BF16))


def test_nan_of_a_scale_spreads_over_its_group() -> None:
    scale = torch.full((2, 2), 127, dtype=torch.uint8)
    scale[1, 0] = 255
    out = block_scaled_mm(fp8(2, 200), fp8(3, 200), scale.view(E8M0), e8m0(1, 2))
    assert out.isnan().tolist() == [[False] * 3, [True] * 3]


def test_the_op_quantizes_in_the_format_of_scale_b() -> None:
    x, b, scale_b = torch.randn(5, 300).bfloat16(), fp8(150, 300), e8m0(2, 3)
    a, scale_a = quantize_fp8_groups(x, use_ue8m0=True)
    assert torch.equal(
        block_scaled_mm(x, b, None, scale_b), block_scaled_mm(a, b, scale_a, scale_b)
    )
    a, scale_a = quantize_fp8_groups(x)
    got = block_scaled_mm(x, b, None, scale_b.float())
    assert torch.equal(got, block_scaled_mm(a, b, scale_a, scale_b))


def test_norms_quantize_with_powers_of_two(opcheck: Any) -> None:
    x, residual = torch.randn(2, 3, 300).bfloat16()
    weight = torch.randn(300)
    scale = rms_norm_quantize_fp8(x, weight, 1e-5, True, use_ue8m0=True)[1]
    assert torch.equal(scale.to(E8M0).float(), scale)
    fine = rms_norm_quantize_fp8(x, weight, 1e-5, True)[1]
    assert torch.equal(scale, ue8m0.round_up(fine))
    assert not torch.equal(scale, fine)
    added = add_rms_norm_quantize_fp8(x, residual, weight, 1e-5, True, use_ue8m0=True)
    want = rms_norm_quantize_fp8(x + residual, weight, 1e-5, True, use_ue8m0=True)
    assert torch.equal(added[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(added[1], want[1])
    opcheck(OPS.rms_norm_quantize_fp8.default, (x, weight, 1e-5, True, True))
    opcheck(OPS.add_rms_norm_quantize_fp8.default, (x, residual, weight, 1e-5, True, True))


def test_kernels_that_read_float32_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode():
        a, b = (torch.empty(8, 256, dtype=FP8, device="cuda") for _ in "ab")
        b = torch.empty(128, 256, dtype=FP8, device="cuda")
        one, e8 = torch.empty(8, 2, device="cuda"), torch.empty(8, 2, dtype=E8M0, device="cuda")
        wide, wide8 = (x.new_empty(1, 2) for x in (one, e8))
    rest = None, BF16
    definition = definition_of(OPS.block_scaled_mm.default)
    assert definition is not None
    of_a, of_b = (f"reads float32 scales, scale_{x} is float8_e8m0fnu" for x in "ab")
    assert block_scaled_mm_deep_gemm.why_not(a, b, e8, wide, *rest) == of_a
    assert block_scaled_mm_deep_gemm.why_not(a, b, one, wide8, *rest) == of_b
    assert block_scaled_mm_aten.why_not(a, b, one, wide8, *rest) == of_b
    assert block_scaled_mm_aten.why_not(a, b, e8, wide, *rest) is None  # copied into float32
    for kernel in definition.kernels:
        if kernel.name in ("triton_small_m", "triton"):
            assert kernel.why_not(a, b, e8, wide8, *rest) is None


class Projection(nn.Module):
    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(fp8(n, k), requires_grad=False)
        scale = e8m0(-(-n // 128), -(-k // 128))
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return block_scaled_mm(x, self.weight, None, self.scale)


def test_padding_keeps_the_numbers() -> None:
    model, x = Projection(150, 300), torch.randn(5, 300).bfloat16()
    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    [row] = compile_ext.explain(compiled).rows
    assert [x.detail for x in row.decisions if x.fired] == [
        "N 150 -> 160, K 300 -> 304: a, b padded",
        "scale_b: its strides are (3, 1): fit(strides % 4)",
    ]


def test_padding_a_scale_adds_ones() -> None:
    scale = e8m0(1, 2)
    padded = Padding((0, 1, 0, 1), 1.0)(scale)  # no contract of ours grows a scale so far
    assert padded.dtype == E8M0
    assert torch.equal(padded[:1, :2].float(), scale.float())
    assert padded[1].float().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, E8M0], ids=str)
def test_layer_of_a_checkpoint(dtype: torch.dtype) -> None:
    weight, scale, bias = fp8(150, 300), e8m0(2, 3), torch.randn(150)
    layer = BlockFp8Linear.from_checkpoint(weight, scale.to(dtype), bias, use_ue8m0=True)
    assert layer.weight.data_ptr() == weight.data_ptr()
    assert layer.weight_scale.dtype == torch.float32
    x = torch.randn(2, 5, 300).bfloat16()
    a, scale_a = quantize_fp8_groups(x.view(10, 300), use_ue8m0=True)
    want = block_scaled_mm(a, weight, scale_a, scale, bias)
    assert torch.equal(layer(x), want.view(2, 5, 150))
    plain = BlockFp8Linear.from_checkpoint(weight, scale.to(dtype), bias)
    want = block_scaled_mm(x.view(10, 300), weight, None, scale.float(), bias)
    assert torch.equal(plain(x), want.view(2, 5, 150))
    layer.load_state_dict({"weight": weight, "weight_scale": scale, "bias": bias})
    assert torch.equal(layer.weight_scale, scale.float())


def test_layer_quantizes_its_weight_with_powers_of_two() -> None:
    layer = BlockFp8Linear(torch.randn(150, 300), use_ue8m0=True)
    assert torch.equal(layer.weight_scale.to(E8M0).float(), layer.weight_scale)


def test_layer_refuses_another_weight() -> None:
    with pytest.raises(DtypeError, match="BlockFp8Linear: found weight of bfloat16"):
        BlockFp8Linear.from_checkpoint(torch.ones(4, 4).bfloat16(), torch.ones(1, 1))
    with pytest.raises(ShapeError, match=r"scale_b of shape \[2, 1\]"):
        BlockFp8Linear.from_checkpoint(fp8(4, 4), torch.ones(2, 1))
