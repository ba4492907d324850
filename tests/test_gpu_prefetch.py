"""On a CUDA device: weights that are fetched before the PDL wait, against writers of everything."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext.layers import BlockFp8Linear
from compile_ext.ops import quantize_fp8_blocks, quantize_fp8_groups, triton_support

pytestmark = pytest.mark.gpu
OPS = torch.ops.compile_ext
BF16 = torch.bfloat16
K = 1024


@pytest.fixture(autouse=True)
def has_pdl() -> None:
    if not triton_support.has_pdl(torch.empty(1, device="cuda")):
        pytest.skip("the device has no programmatic dependent launch")


class Chain(nn.Module):
    """Linear layers, each on what the one before gives."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            BlockFp8Linear(torch.randn(K, K) / K**0.5) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return x


def by_hand(model: Chain, x: Tensor) -> Tensor:
    """Each GEMM starts after everything before it."""
    for layer in model.layers:
        torch.cuda.synchronize()
        a, scale = quantize_fp8_groups(torch.tanh(x))
        x = OPS.block_scaled_mm(a, layer.weight, scale, layer.weight_scale, None, BF16)
    return x


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, scale_a = quantize_fp8_groups(torch.randn(m, k, device="cuda").bfloat16())
    b, scale_b = quantize_fp8_blocks(torch.randn(n, k, device="cuda"))
    return a, b, scale_a, scale_b


@pytest.mark.parametrize("m", [1, 8])
def test_all_but_the_first_prefetch_and_give_the_same(m: int) -> None:
    model, x = Chain().cuda(), torch.randn(m, K, device="cuda").bfloat16()
    compiled = torch.compile(model, backend="compile_ext", dynamic=False)
    with torch.no_grad():
        got = compiled(x)
        want = by_hand(model, x)
    decisions = [
        d.fired
        for row in compile_ext.explain(compiled).rows
        for d in row.decisions
        if d.pass_name == "prefetch_weights"
    ]
    assert sorted(decisions) == [False, True, True, True]
    # tanh is Inductor's, whose last bit differs from PyTorch's: a value in a hundred becomes the
    # next FP8 number, 2^-3 of it away; four layers. A wrong weight would be off by all of it.
    assert (got.float() - want.float()).norm() < 2.0**-4 * want.float().norm()


def test_a_weight_written_right_before_each_call_of_the_graph() -> None:
    model, x = Chain().cuda(), torch.randn(1, K, device="cuda").bfloat16()
    compiled = torch.compile(model, backend="compile_ext", dynamic=False)
    versions = [
        [quantize_fp8_blocks(torch.randn(K, K, device="cuda") / K**0.5)[0] for _ in model.layers]
        for _ in range(2)
    ]

    def write(version: list[Tensor]) -> None:
        for layer, weight in zip(model.layers, version, strict=True):
            assert isinstance(layer, BlockFp8Linear)
            layer.weight.copy_(weight)

    with torch.no_grad():
        want = []
        for version in versions:
            write(version)
            torch.cuda.synchronize()
            want.append(compiled(x).clone())
            torch.cuda.synchronize()
        assert not torch.equal(*want)
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(2000):
            write(versions[i % 2])
            wrong += (compiled(x) != want[i % 2]).any()
    assert int(wrong) == 0


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("shape", [(576, 7168), (4096, 1024), (130, 208)], ids=str)
def test_an_activation_that_its_producer_writes_late(m: int, shape: tuple[int, int]) -> None:
    """A kernel that lets the next one start, waits, and then stores: in a CUDA graph."""
    a, b, scale_a, scale_b = operands(m, *shape)
    want = OPS.block_scaled_mm(a, b, scale_a, scale_b, None, BF16)
    garbage = torch.full_like(a.view(torch.uint8), 0x7E).view(a.dtype)
    late = torch.empty_like(a)
    calls: dict[int, Any] = {}
    for delay in (0, 1, 4):
        late.copy_(garbage)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            late.copy_(garbage)
            # Its own wait is at its start, so it also holds this kernel's dependants back.
            first = OPS.block_scaled_mm(a, b, scale_a, scale_b, None, BF16, False)
            for _ in range(delay):
                torch.cuda._sleep(5000)
            late.copy_(a)
            second = OPS.block_scaled_mm(late, b, scale_a, scale_b, None, BF16, True)
            third = OPS.block_scaled_mm(late, b, scale_a, scale_b, None, BF16, True)
        calls[delay] = graph, first, second, third
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        graph, *results = calls[random.choice(list(calls))]
        graph.replay()
        for result in results:
            wrong += (result != want).any()
    assert int(wrong) == 0


def test_streams_do_not_mix() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    sets = [operands(1, 2112, 1024) for _ in streams]
    want = [OPS.block_scaled_mm(a, b, s, t, None, BF16) for a, b, s, t in sets]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[] for _ in streams]
    for _ in range(200):
        for stream, (a, b, s, t), results in zip(streams, sets, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(OPS.block_scaled_mm_m1(a, b, s, t, None, BF16, True))
    torch.cuda.synchronize()
    for results, one in zip(got, want, strict=True):
        assert all(torch.equal(x, one) for x in results)


def test_no_host_sync_and_one_allocation() -> None:
    a, b, scale_a, scale_b = operands(8, 576, 7168)
    OPS.block_scaled_mm(a, b, scale_a, scale_b, None, BF16, True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        out = OPS.block_scaled_mm(a, b, scale_a, scale_b, None, BF16, True)
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert after - before == 1
    assert out.isfinite().all()


def norms(x: Tensor, blocks: Tensor, w: Tensor, early: bool) -> list[Tensor]:
    """A chain of norms, each of which lets the next one start before it has stored anything."""
    results = [OPS.rms_norm(x, w, 1e-6, True, False)]
    for _ in range(4):
        y, total = OPS.add_rms_norm(results[-1], x, w, 1e-6, True, early)
        z, mixed = OPS.attn_residual(total, blocks, w, 1e-6, w, 1e-6, True, early)
        q, scale = OPS.rms_norm_quantize_fp8(z + y, w, 1e-6, True, False, early)
        results += [
            y,
            total,
            z,
            mixed,
            q.view(torch.uint8),
            scale,
            OPS.rms_norm(z, w, 1e-6, True, early),
        ]
    return results


@pytest.mark.parametrize("m", [1, 3, 300])
@pytest.mark.parametrize("k", [7168, 130])
def test_norms_that_start_early_read_nothing_old(m: int, k: int) -> None:
    """In a CUDA graph whose memory still holds what the replay before, of other numbers, left."""
    w = torch.randn(k, device="cuda")
    versions = [
        (
            torch.randn(m, k, device="cuda").bfloat16(),
            torch.randn(m, 3, k, device="cuda").bfloat16(),
        )
        for _ in range(2)
    ]
    want = [norms(x, blocks, w, early=False) for x, blocks in versions]
    assert not torch.equal(want[0][-1], want[1][-1])
    x, blocks = (t.clone() for t in versions[0])
    norms(x, blocks, w, early=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = norms(x, blocks, w, early=True)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(2000):
        for old, new in zip((x, blocks), versions[i % 2], strict=True):
            old.copy_(new)
        graph.replay()
        for g, t in zip(got, want[i % 2], strict=True):
            wrong += (g != t).any()
    assert int(wrong) == 0
