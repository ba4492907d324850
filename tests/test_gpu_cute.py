"""Kernels in CuTe DSL on a Hopper GPU: loaded from disk, launched by the driver, in graphs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from compile_ext.ops import router_gemm_cute
from compile_ext.ops.cute_kernel import CuteKernel

pytestmark = pytest.mark.gpu
OPS = torch.ops.compile_ext
# Of the sum of magnitudes: products of two bfloat16 are exact in float32, and each of some 50
# additions rounds by 2^-24 at most; with signs at random 1e-8 was seen (H200).
ERROR = 3e-7
SHAPES = [(256, 7168), (384, 7168), (896, 7168), (160, 5120), (128, 2880), (64, 2048), (1, 8)]


@pytest.fixture(autouse=True)
def can_run() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels on disk are those for compute capability 9.0")
    a, b, _ = operands(256, 7168)
    require_kernel(a, b, None)


def require_kernel(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """Skip where it would have to be compiled and cannot be; any other reason is a fault."""
    reason = router_gemm_cute.why_not(a, b, bias)
    if reason is not None and reason.startswith("CuTe DSL is not installed"):
        pytest.skip(reason)
    assert reason is None


def operands(n: int, k: int, m: int = 1, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    a = torch.randn(m, k, device=device).bfloat16()
    b = (torch.randn(n, k, device=device) / k**0.5).bfloat16()
    return a, b, torch.randn(n, device=device)


def assert_right(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    want, magnitude = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    if bias is not None:
        want, magnitude = want + bias.double(), magnitude + bias.double().abs()
    assert out.dtype == torch.float32
    assert float(((out.double() - want).abs() / magnitude).max()) < ERROR


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("m", [1, 2, 5, 16])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_router_is_right(n: int, k: int, m: int, with_bias: bool, prefetch: bool) -> None:
    a, b, bias = operands(n, k, m)
    added = bias if with_bias else None
    require_kernel(a, b, added)
    out = OPS.router_gemm(a, b, added, prefetch=prefetch, pinned="cute")
    assert_right(out, a, b, added)


def test_operands_that_begin_between_16_bytes_are_not_its() -> None:
    a, b, _ = operands(256, 7168)
    shifted = torch.empty(1 + a.numel(), device="cuda", dtype=a.dtype)[1:].view(a.shape)
    shifted.copy_(a)
    assert "a is a view" in str(router_gemm_cute.why_not(shifted, b, None))
    assert_right(OPS.router_gemm(shifted, b, None), a, b, None)


def test_in_a_graph_that_also_loads_the_kernel() -> None:
    layers = [operands(256, 7168) for _ in range(20)]
    for x in vars(router_gemm_cute).values():
        if isinstance(x, CuteKernel):
            x._loaded.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [
            OPS.router_gemm_m1(a, b, None, prefetch=i > 0, pinned="cute")
            for i, (a, b, _) in enumerate(layers)
        ]
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out, (a, b, _) in zip(outs, layers, strict=True):
            assert_right(out, a, b, None)


def test_a_producer_that_is_slow_is_waited_for() -> None:
    a, b, _ = operands(256, 7168)
    for _ in range(50):
        x = torch.zeros_like(a)
        torch.cuda._sleep(100_000)
        x.copy_(a)  # the kernel in front
        assert_right(OPS.router_gemm_m1(x, b, None, prefetch=True, pinned="cute"), a, b, None)


def test_from_a_thread_and_on_another_stream() -> None:
    a, b, _ = operands(256, 7168)
    outs: list[Tensor] = []
    torch.cuda.synchronize()

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs.append(OPS.router_gemm(a, b, None, pinned="cute"))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert len(outs) == 4
    for out in outs:
        assert_right(out, a, b, None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_another_device_than_the_current_one() -> None:
    a, b, _ = operands(256, 7168, device="cuda:1")
    assert torch.cuda.current_device() == 0
    out = OPS.router_gemm(a, b, None, pinned="cute")
    assert out.get_device() == 1
    torch.cuda.synchronize(1)
    assert_right(out, a, b, None)
    assert torch.cuda.current_device() == 0


def test_a_new_process_loads_it_without_cute_dsl() -> None:
    a, b, _ = operands(256, 7168)
    OPS.router_gemm(a, b, None, pinned="cute")  # now it is on disk
    code = """
import json, sys, time, torch
from compile_ext.ops import router_gemm_m1
a = torch.ones(1, 7168, device="cuda", dtype=torch.bfloat16)
b = torch.ones(256, 7168, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
op = torch.ops.compile_ext.router_gemm_m1.default
def timed(count):
    start = time.perf_counter()
    for _ in range(count):
        out = op(a, b, None, pinned="cute")
    return (time.perf_counter() - start) / count, out
first, out = timed(1)
torch.cuda.synchronize()
later = min(timed(100)[0] for _ in range(20))
print(json.dumps([first, later, out.min().item(), out.max().item(), "cutlass" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first, later, low, high, has_cutlass = json.loads(done.stdout)
    print(f"first call {first * 1e3:.1f} ms, later ones {later * 1e6:.1f} us of the host")
    assert (low, high, has_cutlass) == (7168.0, 7168.0, False)
    assert first < 0.3  # found on disk: to compile takes a second and more
