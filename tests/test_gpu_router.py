"""On a CUDA device: norm and router, in one launch and in two; float64 and late writers."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext.ops import cute_support, router_gemm_cute, triton_support
from compile_ext.ops.define import Kernel, definition_of
from compile_ext.ops.router_topk import router_topk_ref

pytestmark = pytest.mark.gpu
OPS = torch.ops.compile_ext
EPS = 1e-6
# Of the sum of magnitudes: products of two bfloat16 are exact in float32, sums in it are not.
ERROR = 3e-7
SHAPES = [(256, 7168), (384, 7168), (896, 7168), (160, 5120), (128, 2880), (64, 2048),
          (1, 8), (33, 1032), (257, 4104), (2048, 4096)]  # fmt: skip


def kernels(op: str) -> list[Kernel]:
    """Those in front of the reference."""
    definition = definition_of(getattr(OPS, op).default)
    assert definition is not None
    names = [k.name for k in definition.kernels]
    return list(definition.kernels[: names.index("reference")])


def can_compile() -> bool:
    """Whether kernels in CuTe DSL have to be among those that ran: all shapes here have K % 8."""
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    return is_hopper and cute_support.compiler() is not None


def normed64(row: Tensor, weight: Tensor) -> Tensor:
    x = row.double()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight.double()


def assert_logits(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    added: Any = 0.0 if bias is None else bias.double()
    want = a.double() @ b.double().t() + added
    magnitude = a.double().abs() @ b.double().abs().t() + (added.abs() if bias is not None else 0.0)
    assert out.dtype == torch.float32
    assert float(((out.double() - want).abs() / magnitude).max()) < ERROR


# Without those that cuBLAS alone runs: more than 8 tokens, and more logits than CuTe DSL's take.
@pytest.mark.parametrize(
    ("n", "k", "m"),
    [
        (n, k, m)
        for n, k in SHAPES
        for m in (1, 2, 3, 7, 8, 9, 16, 17, 33, 64)
        if m <= 8 or m * n <= router_gemm_cute.MAX_LOGITS
    ],
    ids=str,
)
def test_router_gemm_by_each_kernel(n: int, k: int, m: int) -> None:
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()
    ran = []
    for kernel in kernels("router_gemm"):
        for bias in (None, torch.randn(n, device="cuda").bfloat16()):
            if kernel.why_not(a, b, bias) is None and kernel.name != "aten":  # cuBLAS: see docs
                ran.append(kernel.name)
                for prefetch in (False, True):
                    out = kernel.launch((a, b, bias), prefetch=prefetch)
                    assert isinstance(out, Tensor)
                    assert_logits(out, a, b, bias)
    assert m > 8 or "triton_small_m" in ran
    has_cute = can_compile() and m * n <= router_gemm_cute.MAX_LOGITS
    assert ("cute" in ran) >= has_cute
    if not ran:
        pytest.skip(f"{cute_support.why_no_compiler()}, nor is its kernel on disk")


@pytest.mark.parametrize("how", ["plain", "sum", "rounds", "bias", "no weight"])
@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_rms_norm_router_by_each_kernel(n: int, k: int, how: str) -> None:
    x, residual = (torch.randn(1, k, device="cuda").bfloat16() for _ in range(2))
    weight = (torch.rand(k, device="cuda") + 0.5).bfloat16()
    b = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()
    args = (
        x,
        residual if how == "sum" else None,
        None if how == "no weight" else weight,
        EPS,
        how == "rounds",
        b,
        torch.randn(n, device="cuda").bfloat16() if how == "bias" else None,
    )
    ran = []
    for kernel in kernels("rms_norm_router"):
        if kernel.why_not(*args) is not None:
            continue
        ran.append(kernel.name)
        found = kernel.launch(args, prefetch=True)
        assert isinstance(found, tuple)
        y, total, logits = found
        row = x + residual if how == "sum" else x
        assert torch.equal(total, row) if how == "sum" else total.shape == (0,)
        exact = normed64(row, torch.ones_like(weight) if how == "no weight" else weight)
        # One rounding to bfloat16, two where it rounds before the weight.
        ulps = 2.0 if how == "rounds" else 1.0
        assert bool(((y.double() - exact).abs() <= ulps * 2.0**-8 * exact.abs()).all())
        assert_logits(logits, exact, b, args[6])
    assert "triton" in ran
    assert ("cute" in ran) >= can_compile()


CHOICES = {
    "Qwen3": (None, 8, "softmax", 1, 1, 0.0, True, 1.0),
    "DeepSeek": (torch.float32, 8, "sigmoid", 8, 4, float("-inf"), True, 2.5),
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize(("n", "k"), [(256, 7168), (64, 2048), (128, 1032)], ids=str)
def test_rms_norm_router_topk(n: int, k: int, choice: tuple[Any, ...]) -> None:
    """Whatever program is the last: 200 launches, with and without the attribute."""
    bias, *rest = choice
    added = None if bias is None else torch.randn(n, device="cuda")
    x, residual = (torch.randn(1, k, device="cuda").bfloat16() for _ in range(2))
    weight = (torch.rand(k, device="cuda") + 0.5).bfloat16()
    b = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()
    norm = x, residual, weight, EPS, False, b, None
    y, total, logits = OPS.rms_norm_router(*norm, pinned="triton")
    want_weights, want_ids = router_topk_ref(logits, added, *rest)
    for i in range(200):
        found = OPS.rms_norm_router_topk(*norm, added, *rest, i % 2 == 1, pinned="triton")
        assert torch.equal(found[0], y)
        assert torch.equal(found[1], total)
        assert torch.equal(found[3], want_ids)
        assert torch.allclose(found[2], want_weights, rtol=1e-6, atol=0)


class Layer(nn.Module):
    """Norm, router and choice of one layer."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(k, EPS)
        self.gate = nn.Linear(k, n, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(x)
        scores = torch.softmax(self.gate(y).float(), -1)
        weights, ids = torch.topk(scores, 8, -1)
        return y, weights / weights.sum(-1, keepdim=True), ids


class Model(nn.Module):
    def __init__(self, layers: int = 4, n: int = 256, k: int = 4096) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(n, k) for _ in range(layers))

    def forward(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in self.layers:
            x, weights, ids = layer(x)
            found += [weights, ids]
        return [x, *found]


def model_and_token() -> tuple[Model, Tensor]:
    model = Model().cuda().bfloat16()
    return model, torch.randn(1, 4096, device="cuda").bfloat16()


def test_one_token_takes_one_launch_for_norm_and_router() -> None:
    model, x = model_and_token()
    compiled = torch.compile(model, backend="compile_ext", dynamic=False)
    with torch.no_grad():
        y, *choices = compiled(x)
        want_y, *want = model(x)
    fired = {
        d.pass_name for row in compile_ext.explain(compiled).rows for d in row.decisions if d.fired
    }
    assert {"lower_router_linear", "lower_router_norm", "specialize_m1", "fuse_router"} <= fired
    assert {"lower_router_topk", "prefetch_weights"} <= fired
    # Four norms, each rounded once to bfloat16 in another order.
    assert bool(((y - want_y).abs() <= 2.0**-6 * (want_y.abs() + 2.0**-6)).all())
    for weights, expected in zip(choices[::2], want[::2], strict=True):
        # eager rounds its logits to bfloat16: 2^-9 of a logit near 1 is as much of a weight.
        assert torch.allclose(weights, expected, rtol=2.0**-5)


def test_a_weight_written_right_before_each_call() -> None:
    model, x = model_and_token()
    compiled = torch.compile(model, backend="compile_ext", dynamic=False)
    versions = [[torch.randn_like(p) / 64 for p in model.parameters()] for _ in range(2)]

    def write(version: list[Tensor]) -> None:
        for p, value in zip(model.parameters(), version, strict=True):
            p.copy_(value)

    with torch.no_grad():
        want = []
        for version in versions:
            write(version)
            torch.cuda.synchronize()
            want.append([t.clone() for t in compiled(x)])
            torch.cuda.synchronize()
        assert not torch.equal(want[0][0], want[1][0])
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for i in range(10_000):
            write(versions[i % 2])
            for got, expected in zip(compiled(x), want[i % 2], strict=True):
                wrong += (got != expected).any()
    assert int(wrong) == 0


@pytest.mark.parametrize(("n", "k"), [(256, 7168), (896, 7168), (64, 2048)], ids=str)
@pytest.mark.parametrize("m", [1, 5])
def test_a_producer_that_stores_late(n: int, k: int, m: int) -> None:
    """It lets the next kernel start at once, and writes what that one reads after a while; 10,000
    replays of CUDA graphs, bits as without PDL."""
    x = torch.randn(m, k, device="cuda").bfloat16()
    if not triton_support.has_pdl(x):
        pytest.skip("the device has no programmatic dependent launch")
    producer: Any = import_module("compile_ext.testing.process.racy_producer")._write_late
    weight = (torch.rand(k, device="cuda") + 0.5).bfloat16()
    b = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()
    garbage, late = torch.full_like(x, float("nan")), torch.empty_like(x)

    def layer(x: Tensor, prefetch: bool) -> list[Tensor]:
        y = OPS.rms_norm(x, weight, EPS, False, prefetch)
        total = OPS.add_rms_norm(y, x, weight, EPS, False, prefetch)
        found = [y, *total, OPS.router_gemm(total[0], b, None, prefetch)]
        if m == 1:
            norm = x, total[0], weight, EPS, False, b, None
            found += OPS.rms_norm_router(*norm, prefetch)
            choice = CHOICES["Qwen3"]
            found += OPS.rms_norm_router_topk(*norm, *choice, prefetch, pinned="triton")
        return found

    want = layer(x, False)
    graphs: list[tuple[torch.cuda.CUDAGraph, list[Tensor]]] = []
    for spin in (0, 300, 1000, 3000, 10_000):  # ns
        producer[(4,)](x, late, x.numel(), spin, BLOCK=1024)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            late.copy_(garbage)
            producer[(4,)](x, late, x.numel(), spin, BLOCK=1024)
            graphs.append((graph, layer(late, True)))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        graph, results = random.choice(graphs)
        graph.replay()
        for got, expected in zip(results, want, strict=True):
            wrong += (got != expected).any()
    assert int(wrong) == 0
