"""The Triton kernels of grouped and batched weights against float64, interpreted or on the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
NAN = float("nan")
# As in test_fp8_kernels.py: 14 bits inside one instruction of the tensor cores, float32 elsewhere.
ROUNDING = {"cpu": 2.0**-24, "cuda": 2.0**-11}
SIZES = [(128, 128), (40, 200), (257, 130)]  # n, k: whole blocks, partial ones, several tiles


def run(kernel: str, function: str, *args: Any) -> Tensor:
    result: Tensor = getattr(import_module(f"compile_ext.ops.{kernel}_triton"), function)(*args)
    return result


def random_fp8(*shape: int, device: str) -> Tensor:
    return (torch.randn(shape) * 10).to(FP8).to(device)


def scales(*shape: int, device: str) -> Tensor:
    return (torch.rand(shape) + 0.5).to(device)


def up(size: int) -> int:
    return -(-size // 128)


def wide(x: Tensor, scale: Tensor) -> Tensor:
    """``x [..., rows, k]`` times its scales, in float64."""
    rows, k = x.shape[-2:]
    each = scale.repeat_interleave(128, -1)[..., :k]
    if scale.shape[-2] != rows:
        each = each.repeat_interleave(128, -2)[..., :rows, :]
    return x.double() * each.double()


def assert_close(got: Tensor, a: Tensor, b: Tensor) -> None:
    """``got`` is ``a @ b^T`` within the rounding of the sums."""
    exact, magnitude = a @ b.mT, a.abs() @ b.mT.abs()
    bound = (ROUNDING[got.device.type] + (a.shape[-1] + 4) * 2.0**-24) * magnitude + 1e-30
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= bound).all())


def contiguous(device: str, n: int, k: int) -> tuple[Any, ...]:
    """Three groups, the second without rows; block 1 has idle rows behind and in front, block 3 is
    idle."""
    indices = torch.cat([torch.full((128,), 2), torch.full((128,), 0), torch.full((44,), -1)])
    indices[128:140] = -5
    indices[250:256] = 3  # as many as there are groups: no group
    a = random_fp8(300, k, device=device)
    a[-44:] = NAN
    operands = a, random_fp8(3, n, k, device=device), scales(300, up(k), device=device)
    scale_b = scales(3, up(n), up(k), device=device)
    return *operands, scale_b, indices.int().to(device)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_contiguous(size: tuple[int, int], device: str) -> None:
    a, b, scale_a, scale_b, indices = contiguous(device, *size)
    b[1] = NAN  # of a group that nobody is in
    got = run("grouped_block_scaled_mm", "run", a, b, scale_a, scale_b, indices, torch.float32)
    x, w = wide(a, scale_a), wide(b, scale_b)
    for group in (0, 2):
        rows = indices == group
        assert int(rows.sum()) > 100
        assert_close(got[rows], x[rows], w[group])
    idle = (indices < 0) | (indices >= 3)
    assert int(idle.sum()) == 12 + 6 + 44
    assert bool((got[idle] == 0).all())


def test_contiguous_where_two_groups_share_a_block(device: str) -> None:
    """Against the contract: no row gets the numbers of another group."""
    a, b, scale_a, scale_b, indices = contiguous(device, 40, 128)
    indices[:5] = 0  # in a block of group 2
    got = run("grouped_block_scaled_mm", "run", a, b, scale_a, scale_b, indices, torch.float32)
    x, w = wide(a, scale_a), wide(b, scale_b)
    assert_close(got[5:128], x[5:128], w[2])
    assert bool((got[:5] == 0).all())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("expected_m", [1, 70])
def test_masked(size: tuple[int, int], expected_m: int, device: str) -> None:
    n, k = size
    used = torch.tensor([70, 0, 3, 999, -4], dtype=torch.int32, device=device)
    a, b = random_fp8(5, 70, k, device=device), random_fp8(5, n, k, device=device)
    scale_a, scale_b = scales(5, 70, up(k), device=device), scales(5, up(n), up(k), device=device)
    a[2, 3:] = NAN
    args = a, b, scale_a, scale_b, used, expected_m, torch.float32
    got = run("batched_block_scaled_mm", "run_masked", *args)
    assert got.shape == (5, 70, n)
    assert got.is_contiguous()
    x, w = wide(a, scale_a), wide(b, scale_b)
    for group, rows in enumerate([70, 0, 3, 70, 0]):
        assert_close(got[group, :rows], x[group, :rows], w[group])


def test_masked_writes_no_other_row(device: str) -> None:
    """What it leaves alone costs nothing: rows that are not in use keep what was in the memory."""
    a, b = random_fp8(2, 40, 128, device=device), random_fp8(2, 16, 128, device=device)
    scale_a, scale_b = scales(2, 40, 1, device=device), scales(2, 1, 1, device=device)
    used = torch.tensor([7, 0], dtype=torch.int32, device=device)
    out = torch.full((2, 40, 16), 5.0, device=device)
    module = import_module("compile_ext.ops.batched_block_scaled_mm_triton")
    module._launch(a, b, scale_a, scale_b, used, 7, out)
    assert bool((out[0, 7:] == 5).all())
    assert bool((out[1] == 5).all())
    assert bool((out[0, :7] != 5).all())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_bmm(size: tuple[int, int], tokens: int, device: str) -> None:
    d, r = size
    a, b = random_fp8(tokens, 4, r, device=device), random_fp8(4, d, r, device=device)
    scale_a, scale_b = (
        scales(tokens, 4, up(r), device=device),
        scales(4, up(d), up(r), device=device),
    )
    got = run("batched_block_scaled_mm", "run_bmm", a, b, scale_a, scale_b, torch.float32)
    assert got.is_contiguous()
    assert got.shape == (tokens, 4, d)
    x, w = wide(a, scale_a), wide(b, scale_b)
    for head in range(4):
        assert_close(got[:, head], x[:, head], w[head])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_output_dtypes(dtype: torch.dtype, device: str) -> None:
    a, b = random_fp8(2, 1, 128, device=device), random_fp8(1, 16, 128, device=device)
    ones = torch.ones(2, 1, 1, device=device) / 64, torch.ones(1, 1, 1, device=device)
    got = run("batched_block_scaled_mm", "run_bmm", a, b, *ones, dtype)
    want = run("batched_block_scaled_mm", "run_bmm", a, b, *ones, torch.float32)
    assert got.dtype == dtype
    # One ulp: the interpreter cuts float32 off where it should round.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.float(), want, rtol=eps, atol=0)


def test_nothing_to_do(device: str) -> None:
    a, b = random_fp8(2, 0, 128, device=device), random_fp8(2, 16, 128, device=device)
    scale_a, scale_b = scales(2, 0, 1, device=device), scales(2, 1, 1, device=device)
    used = torch.zeros(2, dtype=torch.int32, device=device)
    args = a, b, scale_a, scale_b, used, 1, torch.float32
    assert run("batched_block_scaled_mm", "run_masked", *args).shape == (2, 0, 16)
    indices = used[:0]
    args = a[0], b, scale_a[0], scale_b, indices, torch.float32
    assert run("grouped_block_scaled_mm", "run", *args).shape == (0, 16)
