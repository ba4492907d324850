"""lower_router_linear: the router of a mixture-of-experts layer becomes router_gemm, in every
spelling of the linear, of its bias and of what reads the logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from router_model import IN_FLOAT32, LOGITS, PASS, Router, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compile_ext.passes import PassContext, run_passes

aten = torch.ops.aten


def two_casts(y: Tensor) -> tuple[Tensor, Tensor]:
    return y.float(), y.to(torch.float32)


def two_views(y: Tensor) -> tuple[Tensor, Tensor]:
    return y.reshape(-1, 4, 4).float(), y[0].float()


READERS = {
    "float": lambda x, w: F.linear(x, w).float(),
    "to": lambda x, w: F.linear(x, w).to(torch.float32),
    "to keyword": lambda x, w: F.linear(x, w).to(dtype=torch.float32),
    "type": lambda x, w: F.linear(x, w).type(torch.float32),
    "softmax dtype": lambda x, w: F.softmax(F.linear(x, w), dim=-1, dtype=torch.float32),
    "torch.softmax": lambda x, w: torch.softmax(F.linear(x, w), -1, dtype=torch.float32),
    "method softmax": lambda x, w: F.linear(x, w).softmax(-1, dtype=torch.float32),
    "two casts": lambda x, w: two_casts(F.linear(x, w)),
    "view": lambda x, w: F.linear(x, w).view(-1, 16).float(),
    "views": lambda x, w: F.linear(x, w).view(1, -1, 16).flatten(0, 1).softmax(-1, torch.float32),
    "two views": lambda x, w: two_views(F.linear(x, w)),
}
LINEARS = {
    "F.linear": F.linear,
    "keyword": lambda x, w: F.linear(input=x, weight=w),
    "no bias": lambda x, w: F.linear(x, w, None),
    "aten packet": lambda x, w: aten.linear(x, w),
    "aten overload": lambda x, w: aten.linear.default(x, w),
    "@ t": lambda x, w: x @ w.t(),
    "@ T": lambda x, w: x @ w.T,
    "@ mT": lambda x, w: x @ w.mT,
    "@ transpose": lambda x, w: x @ w.transpose(0, 1),
    "@ permute": lambda x, w: x @ w.permute(1, 0),
    "torch.permute": lambda x, w: torch.mm(x, torch.permute(w, (1, 0))),
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "matmul keyword": lambda x, w: torch.matmul(input=x, other=torch.t(w)),
    "method matmul": lambda x, w: x.matmul(w.t()),
    "mm": lambda x, w: torch.mm(x, w.t()),
    "mm keyword": lambda x, w: torch.mm(input=x, mat2=torch.t(w)),
    "method mm": lambda x, w: x.mm(w.t()),
    "aten mm": lambda x, w: aten.mm(x, w.t()),
    "einsum": lambda x, w: torch.einsum("td,ed->te", x, w),
    "einsum of a list": lambda x, w: torch.einsum("td, ed -> te", [x, w]),
    "einsum ellipsis": lambda x, w: torch.einsum("...d,ed->...e", x, w),
}
BIASES = {
    "F.linear": F.linear,
    "keyword": lambda x, w, b: F.linear(x, w, bias=b),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "addmm keyword": lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w.t()),
    "method addmm": lambda x, w, b: b.addmm(x, w.t()),
    "@ +": lambda x, w, b: x @ w.t() + b,
    "+ @": lambda x, w, b: b + x @ w.t(),
    "linear +": lambda x, w, b: F.linear(x, w) + b,
    "torch.add": lambda x, w, b: torch.add(torch.mm(x, w.t()), b),
    "method add": lambda x, w, b: x.matmul(w.t()).add(b),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_every_reader(rewrite: Any, reader: Any) -> None:
    got = rewrite(Router(reader), tokens(5, 32), tolerance=LOGITS)
    assert {*got.of(PASS)} == {IN_FLOAT32}
    assert "compile_ext::router_gemm(" in got.graph
    assert "linear" not in got.graph
    assert ".to(" not in got.graph  # nothing is rounded


@pytest.mark.parametrize("linear", LINEARS.values(), ids=LINEARS)
def test_every_linear(rewrite: Any, linear: Any) -> None:
    got = rewrite(Router(lambda x, w: linear(x, w).float()), tokens(5, 32), tolerance=LOGITS)
    assert got.of(PASS) == [IN_FLOAT32]
    assert_one_op(got.graph, "float32[5, 16] = compile_ext::router_gemm(arg1, arg0, None)")


@pytest.mark.parametrize("linear", BIASES.values(), ids=BIASES)
def test_every_bias(rewrite: Any, linear: Any) -> None:
    model = Router(lambda x, w, b: linear(x, w, b).float(), bias=True)
    got = rewrite(model, tokens(5, 32), tolerance=2 * LOGITS)  # eager rounds product and sum
    assert got.of(PASS) == [IN_FLOAT32]
    assert_one_op(got.graph, "compile_ext::router_gemm(")
    assert "None)" not in got.graph


def assert_one_op(graph: str, text: str) -> None:
    calls = [line for line in graph.splitlines() if line.startswith("%")]
    assert len(calls) == 1, graph
    assert text in calls[0]


@pytest.mark.parametrize(
    "linear",
    [
        lambda x, w: x @ w,
        lambda x, w: torch.einsum("td,de->te", x, w),
        lambda x, w: F.linear(x, w.t()),
    ],
)
def test_a_weight_stored_transposed(rewrite: Any, linear: Any) -> None:
    model = Router(lambda x, w: linear(x, w).float(), n=32, k=16)  # w is [k, n]
    got = rewrite(model, tokens(5, 32), tolerance=2 * LOGITS)
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[32, 16]
arg1: bfloat16[5, 32]
%0: bfloat16[16, 32] = .t(arg0)
%1: float32[5, 16] = compile_ext::router_gemm(arg1, %0, None)
return [%1]""",
    )


def test_out_dtype() -> None:
    """``torch.mm(out_dtype=)`` has no kernel on a CPU: with the op it runs there too."""

    def routed(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x, w.t(), out_dtype=torch.float32)

    model, x = Router(routed), tokens(5, 32)
    with torch.no_grad():
        options: dict[str, Any] = {"compile_ext.inner": "eager"}
        got = torch.compile(model, backend="compile_ext", options=options)(x)
        assert torch.equal(got, F.linear(x.float(), model.w.float()))


@pytest.mark.parametrize("shape", [(32,), (2, 3, 32), (1, 1, 32)], ids=str)
@pytest.mark.parametrize("linear", [F.linear, lambda x, w: x @ w.t()], ids=["linear", "@"])
def test_leading_dimensions(rewrite: Any, linear: Any, shape: tuple[int, ...]) -> None:
    got = rewrite(Router(lambda x, w: linear(x, w).float()), tokens(*shape), tolerance=LOGITS)
    assert got.of(PASS) == [IN_FLOAT32]
    assert f"float32{[*shape[:-1], 16]}" in got.graph


def test_graph(rewrite: Any) -> None:
    x = tokens(5, 32)
    torch._dynamo.mark_dynamic(x, 0)
    got = rewrite(
        Router(lambda x, w: torch.topk(F.linear(x, w).float().softmax(-1), 2).values),
        x,
        tolerance=LOGITS,
    )
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[16, 32]
arg2: bfloat16[s0, 32]
%0: float32[s0, 16] = compile_ext::router_gemm(arg2, arg0, None)
%1: float32[s0, 16] = .softmax(%0, -1)
%2 = topk(%1, 2)
%3: float32[s0, 2] = getitem(%2, 0)
return [%3]""",
    )


def test_module_with_bias(rewrite: Any) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 16).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x).float()

    got = rewrite(Gate(), tokens(2, 3, 32), tolerance=LOGITS)
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[16, 32]
arg1: bfloat16[16]
arg2: bfloat16[2, 3, 32]
%0: float32[2, 3, 16] = compile_ext::router_gemm(arg2, arg0, arg1)
return [%0]""",
    )


def test_logits_are_those_of_float32() -> None:
    model, x = Router(READERS["float"]), tokens(5, 32)
    with torch.no_grad():
        compiled = torch.compile(
            model, backend="compile_ext", options={"compile_ext.inner": "eager"}
        )
        assert torch.equal(compiled(x), F.linear(x.float(), model.w.float()))


def test_in_a_subgraph_and_after_a_graph_break(rewrite: Any) -> None:
    class Checkpointed(Router):
        def forward(self, x: Tensor) -> Any:
            torch._dynamo.graph_break()
            return checkpoint(super().forward, x, use_reentrant=False)

    got = rewrite(Checkpointed(READERS["float"]), tokens(5, 32), tolerance=LOGITS)
    assert got.of(PASS) == [IN_FLOAT32]
    assert "router_gemm" in got.graph


@pytest.mark.parametrize("reader", ["softmax dtype", "views", "two casts"])
def test_idempotent(rewrite: Any, reader: str) -> None:
    got = rewrite(Router(READERS[reader]), tokens(5, 32), tolerance=LOGITS)
    before = got.graph
    run_passes(PassContext(got.modules[-1], [tokens(1)] * 2))
    assert got.graph == before


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_the_check_agrees(rewrite: Any, reader: Any) -> None:
    """``compile_ext.check`` compares the logits with those that the rewrite did not round."""
    options = {"compile_ext.check": True}
    rewrite(Router(reader), tokens(5, 32), tolerance=LOGITS, options=options)
