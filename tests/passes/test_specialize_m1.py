"""specialize_m1: one token takes the op's M == 1 variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compile_ext
from compile_ext.ops import router_gemm

PASS = "specialize_m1"
ops = torch.ops.compile_ext_tests

CALLS = {
    "packet": lambda x, w: ops.gemm(x, w, None, None, False),
    "overload": lambda x, w: ops.gemm.default(x, w, None, None, False),
    "keyword": lambda x, w: ops.gemm(x=x, w=w, scale=None, bias=None, quantized=False),
}


class Gemm(nn.Module):
    def __init__(self, call: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.call = call
        self.w = nn.Parameter(torch.randn(8, 8, dtype=dtype))

    def forward(self, x: Tensor) -> Any:
        return self.call(x, self.w)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_third_party_op_in_every_spelling(rewrite: Any, call: Any) -> None:
    got = rewrite(Gemm(call), torch.randn(1, 8))
    assert got.of(PASS) == [(True, "M == 1: compile_ext_tests::gemm_m1")]
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[1, 8]
%0: float32[1, 8] = compile_ext_tests::gemm_m1(arg1, arg0, None, None, False)
return [%0]""",
    )


@pytest.mark.parametrize("shape", [(1, 8), (1, 1, 8), (8,)], ids=str)
def test_router(rewrite: Any, shape: tuple[int, ...]) -> None:
    got = rewrite(Gemm(router_gemm, torch.bfloat16), torch.randn(shape).bfloat16())
    assert got.of(PASS) == [(True, "M == 1: compile_ext::router_gemm_m1")]
    assert "router_gemm_m1" in got.graph


def test_two_graphs_over_all_m(rewrite: Any) -> None:
    model = Gemm(CALLS["packet"])
    got = rewrite(model, torch.randn(5, 8), dynamic=True)
    with torch.no_grad():
        compiled = torch.compile(
            model, backend="compile_ext", options={"compile_ext.inner": "eager"}, dynamic=True
        )
        for m in (1, 2, 17, 64):
            x = torch.randn(m, 8)
            assert torch.equal(compiled(x), model(x))
    assert len(got.modules) == 2
    assert [fired for fired, _ in got.of(PASS)] == [False, True]


def test_in_a_subgraph_and_after_a_graph_break(rewrite: Any) -> None:
    class Checkpointed(Gemm):
        def forward(self, x: Tensor) -> Any:
            torch._dynamo.graph_break()
            return checkpoint(super().forward, x, use_reentrant=False)

    got = rewrite(Checkpointed(CALLS["packet"]), torch.randn(1, 8))
    assert got.of(PASS) == [(True, "M == 1: compile_ext_tests::gemm_m1")]


def test_idempotent(rewrite: Any) -> None:
    got = rewrite(Gemm(CALLS["packet"]), torch.randn(1, 8))
    from compile_ext.passes import PassContext, run_passes

    before = got.graph
    run_passes(PassContext(got.modules[-1], [torch.randn(1)] * 2))
    assert got.graph == before


@pytest.mark.parametrize(("shape", "says"), [((1, 3, 8), "M == 1"), ((3, 1, 8), "M = 3")], ids=str)
def test_m_is_one_axis(rewrite: Any, shape: tuple[int, ...], says: str) -> None:
    class Heads(Gemm):
        def __init__(self) -> None:
            super().__init__(ops.bmm)
            self.w = nn.Parameter(torch.randn(shape[1], 8, 8))

    got = rewrite(Heads(), torch.randn(shape))
    [(_, detail)] = got.of(PASS)
    assert detail.startswith(says)
    assert ("bmm_m1" in got.graph) == (shape[0] == 1)


def test_not_five_tokens(rewrite: Any) -> None:
    got = rewrite(Gemm(CALLS["packet"]), torch.randn(5, 8))
    assert got.of(PASS) == [(False, "M = 5")]


def test_not_a_dynamic_m(rewrite: Any) -> None:
    x = torch.randn(5, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=512)
    got = rewrite(Gemm(CALLS["packet"]), x)
    assert got.of(PASS) == [(False, "M is 2..512")]


def test_not_an_unbacked_m(rewrite: Any) -> None:
    x = torch.randn(1, 8)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    got = rewrite(Gemm(CALLS["packet"]), x)
    assert got.of(PASS) == [(False, "M is 0..")]


WRITES = {
    "in place": lambda w, x: w.add_(x.sum()),
    "through a view": lambda w, x: w.view(-1)[:4].mul_(2),
    "index": lambda w, x: w.__setitem__(0, 1.0),
    "out": lambda w, x: torch.mul(w, 2, out=w),
    "function": lambda w, x: F.relu(w, inplace=True),
    "augmented": lambda w, x: w.__iadd__(x.sum()),
    "data": lambda w, x: w.data.mul_(2),
    "a LoRA merge": lambda w, x: w.addmm_(x.t(), x),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_not_a_weight_with_a_writer_in_the_graph(write: Any) -> None:
    class Written(Gemm):
        v: Tensor

        def __init__(self) -> None:
            super().__init__(None)
            self.register_buffer("v", torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            write(self.v, x)
            return ops.gemm(x, self.v, None, None, False)

    torch._dynamo.reset()
    model, twin = Written(), Written()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(1, 8)
    with torch.no_grad():
        want = twin(x)
        result = torch.compile(
            model, backend="compile_ext", options={"compile_ext.inner": "eager"}
        )(x)
        assert torch.equal(result, want)
        assert torch.equal(model.v, twin.v)
    said = [
        d.detail
        for row in compile_ext.explain(model).rows
        for d in row.decisions
        if d.pass_name == PASS
    ]
    assert said == ["the graph writes w"]
