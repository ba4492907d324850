"""strip_placeholder_fills: arguments that an op does not read, and fills of buffers that it
overwrites.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compile_ext

PASS = "strip_placeholder_fills"
ops = torch.ops.compile_ext_tests

FILLS = {
    "new_ones": lambda x: x.new_ones(1),
    "new_zeros": lambda x: x.new_zeros((1,)),
    "new_full": lambda x: x.new_full((1,), 2.0),
    "new_empty": lambda x: x.new_empty(1),
    "torch.ones": lambda x: torch.ones(1),
    "torch.zeros": lambda x: torch.zeros(1, device=x.device),
    "torch.full": lambda x: torch.full((1,), 1.0),
    "ones_like": lambda x: torch.ones_like(x),
    "aten": lambda x: torch.ops.aten.ones.default([1]),
    "a computed value": lambda x: x.sum().reshape(1),
}

CALLS = {
    "packet": lambda x, w, s: ops.gemm(x, w, s, None, False),
    "overload": lambda x, w, s: ops.gemm.default(x, w, s, None, False),
    "keyword": lambda x, w, s: ops.gemm(x=x, w=w, scale=s, bias=None, quantized=False),
}


class Filled(nn.Module):
    def __init__(self, call: Any, fill: Any) -> None:
        super().__init__()
        self.call, self.fill = call, fill
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.call(x, self.w, self.fill(x))


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_unread_argument_becomes_none(rewrite: Any, call: Any, fill: Any) -> None:
    got = rewrite(Filled(call, fill), torch.randn(5, 8))
    assert got.of(PASS) == [(True, "scale is not read: None")]
    gemm = next(n for n in got.modules[-1].graph.nodes if "gemm" in str(n.target))
    assert gemm.args[2] is None


def test_graph(rewrite: Any) -> None:
    got = rewrite(Filled(CALLS["packet"], FILLS["new_ones"]), torch.randn(5, 8))
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[5, 8]
%0: float32[5, 8] = compile_ext_tests::gemm(arg1, arg0, None, None, False)
return [%0]""",
    )


SHARED = "s is not read: a shared buffer, uninitialised"


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_plain_tensor_argument_becomes_a_shared_buffer(rewrite: Any, fill: Any) -> None:
    got = rewrite(Filled(lambda x, w, s: ops.gemm_nn(x, w, s), fill), torch.randn(5, 8))
    assert got.of(PASS) == [(True, SHARED)]
    derived, gemm = (
        n for n in got.modules[-1].graph.nodes if "derived" in n.name or "gemm" in n.name
    )
    assert gemm.args[2] is derived
    assert not [n for n in got.modules[-1].graph.nodes if n.op == "call_method"]


def test_plain_tensor_argument_graph(rewrite: Any) -> None:
    got = rewrite(
        Filled(lambda x, w, s: ops.gemm_nn(x, w, s), FILLS["new_ones"]), torch.randn(5, 8)
    )
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[5, 8]
arg2: float32[1] = uninitialised
%0: float32[5, 8] = compile_ext_tests::gemm_nn(arg1, arg0, arg2)
return [%0]""",
    )


def test_dynamic_m(rewrite: Any) -> None:
    x = torch.randn(5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    got = rewrite(Filled(CALLS["packet"], FILLS["ones_like"]), x)
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg2: float32[s0, 8]
%0: float32[s0, 8] = compile_ext_tests::gemm(arg2, arg0, None, None, False)
return [%0]""",
    )


def test_other_readers_keep_the_fill(rewrite: Any) -> None:
    def call(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return ops.gemm(x, w, s, None, False), s + 1

    got = rewrite(Filled(call, FILLS["new_ones"]), torch.randn(5, 8))
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[5, 8]
%0: float32[1] = .new_ones(arg1, 1)
%1: float32[5, 8] = compile_ext_tests::gemm(arg1, arg0, None, None, False)
%2: float32[1] = add(%0, 1)
return [%1, %2]""",
    )


def test_mutated_fill_keeps_its_writes(rewrite: Any) -> None:
    def call(x: Tensor, w: Tensor, s: Tensor) -> Any:
        s.add_(1)  # nobody reads the result of this node, and it must not be removed as dead
        y = ops.gemm(x, w, s, None, False)
        return y, s

    got = rewrite(Filled(call, FILLS["new_ones"]), torch.randn(5, 8))
    assert got.of(PASS) == [
        (True, "scale is not read: None"),
        (False, "what fills scale stays: the graph hands it out"),
    ]


def test_overwritten_buffer_is_not_filled(rewrite: Any) -> None:
    def copy(x: Tensor) -> Tensor:
        out = torch.zeros(5, 8)
        ops.copy_out(x, out)
        return out

    got = rewrite(copy, torch.randn(5, 8))
    assert got.of(PASS) == [(True, "out is overwritten in full: what filled it is gone")]
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[5, 8]
%0: float32[5, 8] = empty_strided([5, 8], [8, 1], device=cpu, dtype=float32)
%1 = compile_ext_tests::copy_out(arg0, %0)
return [%0]""",
    )


def test_in_a_subgraph(rewrite: Any) -> None:
    class Checkpointed(Filled):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    got = rewrite(Checkpointed(CALLS["packet"], FILLS["new_ones"]), torch.randn(5, 8))
    assert got.of(PASS) == [(True, "scale is not read: None")]
    assert "ones" not in got.graph


def test_after_a_graph_break(rewrite: Any) -> None:
    def call(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return ops.gemm(x, w, s, None, False)

    got = rewrite(Filled(call, FILLS["new_ones"]), torch.randn(5, 8))
    assert got.of(PASS) == [(True, "scale is not read: None")]


def test_layer_compile() -> None:
    layers = nn.Sequential(*(Filled(CALLS["packet"], FILLS["new_ones"]) for _ in range(3)))
    x = torch.randn(5, 8)
    with torch.no_grad():
        want = layers(x)
        for layer in layers:
            layer.compile(backend="compile_ext", options={"compile_ext.inner": "eager"})
        assert torch.equal(layers(x), want)
    report = compile_ext.explain(layers)
    assert [row.module for row in report.rows] == ["0.w", "1.w", "2.w"]
    for row in report.rows:
        assert "scale is not read: None" in [d.detail for d in row.decisions if d.fired]


def test_idempotent(rewrite: Any) -> None:
    got = rewrite(
        Filled(lambda x, w, s: ops.gemm_nn(x, w, s), FILLS["new_ones"]), torch.randn(5, 8)
    )
    from compile_ext.passes import PassContext, run_passes

    before = got.graph
    run_passes(PassContext(got.modules[-1], [torch.randn(1)] * 3))
    assert got.graph == before


def test_not_when_read(rewrite: Any) -> None:
    got = rewrite(
        Filled(lambda x, w, s: ops.gemm(x, w, s, None, True), FILLS["new_ones"]), torch.randn(5, 8)
    )
    assert got.of(PASS) == [
        (False, "scale is read"),
        (True, "full(1), which it reads, is a constant"),
    ]


def test_symbolic_size_becomes_empty(rewrite: Any) -> None:
    x = torch.randn(5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    got = rewrite(Filled(lambda x, w, s: ops.gemm_nn(x, w, s), FILLS["ones_like"]), x)
    assert got.of(PASS) == [(True, "s is not read: uninitialised")]
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg2: float32[s0, 8]
%0: float32[s0, 8] = empty_strided([arg1, 8], [8, 1], device=cpu, dtype=float32)
%1: float32[s0, 8] = compile_ext_tests::gemm_nn(arg2, arg0, %0)
return [%1]""",
    )


def test_not_a_buffer_that_is_read_first(rewrite: Any) -> None:
    def read_first(x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(5, 8)
        total = out.view(-1).sum()
        ops.copy_out(x, out)
        return out, total

    got = rewrite(read_first, torch.randn(5, 8))
    assert got.of(PASS) == [(False, "the buffer is used before the op overwrites it")]
    assert "empty" not in got.graph


def test_not_when_a_gradient_is_needed(rewrite: Any) -> None:
    x = torch.randn(5, 8, requires_grad=True)
    got = rewrite(Filled(CALLS["packet"], FILLS["new_ones"]), x, grad=True)
    assert got.of(PASS) == [
        (False, "it needs a gradient"),
        (False, "full(1), which it reads, is made on each call: it needs a gradient"),
    ]


def test_switched_off(rewrite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_EXT_DISABLE", PASS)
    got = rewrite(Filled(CALLS["packet"], FILLS["new_ones"]), torch.randn(5, 8))
    assert got.of(PASS) == []
    assert "ones" in got.graph
