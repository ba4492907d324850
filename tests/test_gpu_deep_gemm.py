"""DeepGEMM's grouped and batched kernels on a Hopper GPU, against the references."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import deep_gemm_support
from compile_ext.ops.define import definition_of

pytestmark = pytest.mark.gpu
OPS = torch.ops.compile_ext
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
# Of the result's norm: two roundings to bfloat16, 2^-9 each of an element, and the 14 bits that
# Hopper's tensor cores keep of a sum of FP8 products.
ERROR = 4e-3


@pytest.fixture(autouse=True)
def installed() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("DeepGEMM's kernels here are those for compute capability 9.0")
    if importlib.util.find_spec("deep_gemm") is None:
        pytest.skip("DeepGEMM is not installed")
    assert deep_gemm_support.why_not() is None  # installed and broken is no reason to skip


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(FP8)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda") + 0.5


def both(op: Any, *args: Any) -> tuple[Tensor, Tensor]:
    """What DeepGEMM gives, which is the op's own choice, and what the reference gives."""
    definition = definition_of(op)
    assert definition is not None
    kernel, reasons = definition.kernel_for(*args)
    assert (kernel.name, reasons) == ("deep_gemm", {})
    return op(*args), op(*args, pinned="reference")


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert float((got.float() - want.float()).norm() / want.float().norm()) < ERROR


@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (576, 512), (64, 128)])
@pytest.mark.parametrize("m", [1, 129, 1000, 4096])
def test_contiguous(m: int, n: int, k: int) -> None:
    blocks = torch.arange(m, device="cuda") // 128
    index = (blocks * 5 % 8).int()
    index[blocks % 7 == 3] = -1
    index[(torch.arange(m, device="cuda") % 128 < 3) & (m > 1)] = 8  # in front of its block
    index[200:210] = -7
    a = fp8(m, k)
    a.view(torch.uint8)[(index < 0) | (index >= 8)] = 0x7F  # NaN
    args = a, fp8(8, n, k), scales(m, k // 128), scales(8, -(-n // 128), k // 128), index, BF16
    got, want = both(OPS.grouped_block_scaled_mm.default, *args)
    assert bool((got[(index < 0) | (index >= 8)] == 0).all())
    assert_close(got, want)


@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (576, 512), (64, 128)])
@pytest.mark.parametrize("m_max", [128, 384])
@pytest.mark.parametrize("expected_m", [1, 64, 1000])
def test_masked(expected_m: int, m_max: int, n: int, k: int) -> None:
    used = torch.tensor([m_max, 0, 3, 9999, -4, 65, 1, m_max - 1], dtype=torch.int32).cuda()
    args = fp8(8, m_max, k), fp8(8, n, k), scales(8, m_max, k // 128)
    args = *args, scales(8, -(-n // 128), k // 128), used, expected_m, BF16
    got, want = both(OPS.grouped_block_scaled_mm_masked.default, *args)
    for group, rows in enumerate(used.clamp(0, m_max).tolist()):
        if rows:
            assert_close(got[group, :rows], want[group, :rows])


@pytest.mark.parametrize(("d", "r"), [(512, 128), (128, 512), (192, 256)])
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
def test_bmm(tokens: int, d: int, r: int) -> None:
    args = fp8(tokens, 16, r), fp8(16, d, r), scales(tokens, 16, r // 128)
    got, want = both(OPS.fp8_bmm.default, *args, scales(16, -(-d // 128), r // 128), BF16)
    assert_close(got, want)


def test_contiguous_under_a_cuda_graph() -> None:
    index = torch.zeros(256, dtype=torch.int32, device="cuda")
    args = fp8(256, 512), fp8(2, 256, 512), scales(256, 4), scales(2, 2, 4), index, BF16
    op = OPS.grouped_block_scaled_mm.default
    op(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*args)
    index[128:] = 1
    index[200:] = -1
    graph.replay()
    assert_close(out, op(*args, pinned="reference"))
