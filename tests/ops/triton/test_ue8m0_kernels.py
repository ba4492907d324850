"""The Triton kernels on scales that are powers of two, interpreted or on the GPU: the bits that
float32 scales give.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import quantize_fp8_groups
from compile_ext.ops.ue8m0 import round_up

FP8, E8M0, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32
NAN, INF = float("nan"), float("inf")


def run(module: str, *args: Any, function: str = "run") -> Any:
    return getattr(import_module(f"compile_ext.ops.{module}"), function)(*args)


def e8m0(*shape: int, device: str) -> Tensor:
    """Scales from 2^-7 to 2^4."""
    return torch.randint(120, 132, shape, dtype=torch.uint8, device=device).view(E8M0)


def fp8(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(FP8)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) and torch.equal(x.isnan(), y.isnan())


def products_of_one(scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """1 times 1, for each token and head that there is a scale for."""
    tokens, heads, device = scale_a.shape[0], scale_b.shape[0], scale_a.device
    one = torch.zeros(max(tokens, heads), 1, 128, device=device)
    one[..., 0] = 1
    a, b = one[:tokens].expand(tokens, heads, 128).to(FP8), one[:heads].to(FP8)
    args = a, b, scale_a.expand(tokens, heads, 1), scale_b, F32
    out: Tensor = run("batched_block_scaled_mm_triton", *args, function="run_bmm")
    return out.flatten()


def test_every_byte_means_what_torch_says(device: str) -> None:
    """2^-127 is a subnormal, 0xFF is NaN."""
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(E8M0).view(256, 1, 1)
    one = torch.ones(1, 1, 1, device=device)
    got = products_of_one(scale, one)
    assert same_bits(got, scale.float().flatten())
    assert got[0] == 2.0**-127
    few = scale[[0, 1, 127, 254, 255]]
    assert same_bits(products_of_one(one, few), few.float().flatten())


def call(
    case: str, device: str
) -> tuple[str, str, Tensor, Tensor, Tensor, Tensor, tuple[Any, ...]]:
    scale_b = e8m0(3, 2, 3, device=device)
    b = fp8(3, 150, 300, device=device)
    if case == "dense":
        a, scale = fp8(5, 300, device=device), e8m0(3, 5, device=device).t()
        return "block_scaled_mm_triton", "run", a, b[0], scale, scale_b[0], (None, F32)
    if case == "contiguous":
        a, scale = fp8(130, 300, device=device), e8m0(130, 3, device=device)
        index = torch.full((130,), 2, dtype=torch.int32, device=device)
        return "grouped_block_scaled_mm_triton", "run", a, b, scale, scale_b, (index, F32)
    a, scale = fp8(3, 5, 300, device=device), e8m0(3, 5, 3, device=device)
    module = "batched_block_scaled_mm_triton"
    if case == "masked":
        used = torch.full((3,), 5, dtype=torch.int32, device=device)
        return module, "run_masked", a, b, scale, scale_b, (used, 5, F32)
    return module, "run_bmm", a.transpose(0, 1), b, scale.transpose(0, 1), scale_b, (F32,)


@pytest.mark.parametrize("case", ["dense", "contiguous", "masked", "bmm"])
@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_gemms_give_the_bits_of_float32_scales(case: str, which: str, device: str) -> None:
    module, function, a, b, scale_a, scale_b, rest = call(case, device)
    want = run(module, a, b, scale_a.float(), scale_b.float(), *rest, function=function)
    scale_a = scale_a if which in ("a", "both") else scale_a.float()
    scale_b = scale_b if which in ("b", "both") else scale_b.float()
    got = run(module, a, b, scale_a, scale_b, *rest, function=function)
    assert got.abs().max() > 1
    assert torch.equal(got, want)


def test_a_bfloat16_activation_is_quantized_in_the_format_of_scale_b(device: str) -> None:
    x = (torch.randn(5, 300, device=device) * torch.logspace(-3, 3, 300, device=device)).bfloat16()
    x[0], x[1, 5] = 0, NAN
    x[2, 0] = 448  # the scale is a power of two as it is
    b, scale_b = fp8(150, 300, device=device), e8m0(2, 3, device=device)
    a, scale_a = quantize_fp8_groups(x, use_ue8m0=True)
    args = b, None, scale_b, None, F32
    got = run("block_scaled_mm_triton", x, *args)
    want = run("block_scaled_mm_triton", a, b, scale_a, scale_b, None, F32)
    assert same_bits(got, want)
    fine = run("block_scaled_mm_triton", x, b, None, scale_b.float(), None, F32)
    assert not same_bits(got, fine)


def test_norms_quantize_with_powers_of_two(device: str) -> None:
    x = torch.randn(6, 300, device=device) * torch.logspace(-3, 3, 300, device=device)
    x[0], x[1, 5], x[2, 7] = 0, NAN, INF
    module, args = "rms_norm_quantize_fp8_triton", (None, 1e-6, False)
    _, fine = run(module, x, *args)
    q, scale = run(module, x, *args, True)
    assert same_bits(scale, round_up(fine))
    # What it rounds is the norm, of which rsqrt is no bit of the reference's: against the norm that
    # the other scales give, half a step of each.
    fine_q, _ = run(module, x, *args)
    each, fine_each = (s.repeat_interleave(128, 1)[:, :300] for s in (scale, fine))
    y = fine_q.float() * fine_each
    bound = 2.0**-3 * y.abs() + 2.0**-9 * each
    finite = y.isfinite().all(1)
    assert finite.tolist() == [True, False, False, True, True, True]
    assert bool(((q.float() * each - y).abs() <= bound)[finite].all())
    assert torch.equal(q.float().isnan(), fine_q.float().isnan())
    zero = torch.zeros_like(x)
    added = run(module, x, zero, *args, True, function="run_add")
    assert torch.equal(added[0].view(torch.uint8), q.view(torch.uint8))
    assert same_bits(added[1], scale)
