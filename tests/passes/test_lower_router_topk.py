"""lower_router_topk: where it fires, what the graph looks like then, and when it stands back.

Spellings and near misses are in ``router_topk/``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from choice_model import PASS, ROUNDING, TOP_K, Model, N, dense, grouped, softmax, tokens
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compile_ext
from compile_ext.ops import router_gemm, triton_support
from compile_ext.ops.define import definition_of
from compile_ext.ops.router_topk import OP as ROUTER_TOPK

pytestmark = pytest.mark.usefixtures("choice_kernel")
FIRED = [(True, "top 4 of 24, softmax")]


def test_graph(rewrite: Any) -> None:
    got = rewrite(Model(softmax), tokens(5, 32), tolerance=ROUNDING)
    assert got.of(PASS) == FIRED
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[24, 32]
arg1: bfloat16[5, 32]
%0: float32[5, 24] = compile_ext::router_gemm(arg1, arg0, None)
%1 = compile_ext::router_topk(%0, None, 4, softmax, 1, 1, 0.0, True, 1.0)
%2: float32[5, 4] = getitem(%1, 0)
%3: int64[5, 4] = getitem(%1, 1)
return [%2, %3]""",
    )


def test_graph_of_groups_and_a_bias(rewrite: Any) -> None:
    got = rewrite(Model(grouped), tokens(5, 32), tolerance=ROUNDING)
    assert got.of(PASS) == [(True, "top 4 of 24, sigmoid, bias, 2 of 4 groups")]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[24, 32]
arg1: bfloat16[5, 32]
arg2: float32[24]
%0: float32[5, 24] = compile_ext::router_gemm(arg1, arg0, None)
%1 = compile_ext::router_topk(%0, arg2, 4, sigmoid, 4, 2, -inf, True, 2.5)
%2: float32[5, 4] = getitem(%1, 0)
%3: int64[5, 4] = getitem(%1, 1)
%4: float32[5, 24] = .new_zeros(%2, 5, 24)
%5: float32[5, 24] = .scatter(%4, 1, %3, %2)
return [%5]""",
    )


def test_graph_with_leading_dimensions_and_dynamic_m(rewrite: Any) -> None:
    def body(logits: Tensor, bias: Tensor) -> Any:
        return softmax(logits.view(-1, N), bias)

    x = tokens(2, 3, 32)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    got = rewrite(Model(body), x, tolerance=ROUNDING)
    assert got.of(PASS) == FIRED
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[24, 32]
arg3: bfloat16[s0, s1, 32]
%0: float32[s0, s1, 24] = compile_ext::router_gemm(arg3, arg0, None)
%1 = compile_ext::router_topk(%0, None, 4, softmax, 1, 1, 0.0, True, 1.0)
%2: float32[s0, s1, 4] = getitem(%1, 0)
%3: float32[s2, 4] = .view(%2, -1, 4)
%4: int64[s0, s1, 4] = getitem(%1, 1)
%5: int64[s2, 4] = .view(%4, -1, 4)
return [%3, %5]""",
    )


def test_graph_of_logits_that_others_read_and_of_weights_in_bfloat16(rewrite: Any) -> None:
    def body(logits: Tensor, bias: Tensor) -> Any:
        values, ids = logits.bfloat16().topk(TOP_K)  # gpt-oss
        weights = values.softmax(-1, dtype=values.dtype)
        return dense(weights, ids), logits

    # Of the op, the logits are not rounded: by 2^-9 of up to 4, as a change of a weight below 1.
    got = rewrite(Model(body), tokens(5, 32), tolerance=2.0**-7 + 2.0**-9)
    assert got.of(PASS) == FIRED
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[24, 32]
arg1: bfloat16[5, 32]
%0: float32[5, 24] = compile_ext::router_gemm(arg1, arg0, None)
%1 = compile_ext::router_topk(%0, None, 4, softmax, 1, 1, 0.0, True, 1.0)
%2: float32[5, 4] = getitem(%1, 0)
%3: bfloat16[5, 4] = .to(%2, bfloat16)
%4: int64[5, 4] = getitem(%1, 1)
%5: bfloat16[5, 24] = .new_zeros(%3, 5, 24)
%6: bfloat16[5, 24] = .scatter(%5, 1, %4, %3)
return [%6, %0]""",
    )


def test_each_layer(rewrite: Any) -> None:
    def body(logits: Tensor, bias: Tensor) -> Any:
        for _ in range(3):
            weights, ids = softmax(logits, bias)
            logits = router_gemm(dense(weights, ids).bfloat16(), torch.eye(N).bfloat16())
        return logits

    got = rewrite(Model(body), tokens(5, 32), tolerance=1e-2)  # weights are rounded to bfloat16
    assert got.of(PASS) == FIRED * 3
    assert got.graph.count("compile_ext::router_topk(") == 3


def test_idempotent(rewrite: Any) -> None:
    got = rewrite(Model(grouped), tokens(5, 32), tolerance=ROUNDING)
    from compile_ext.passes import PassContext, run_passes

    before = got.graph
    run_passes(PassContext(got.modules[-1], [tokens(1)] * 3))
    assert got.graph == before


@pytest.mark.parametrize("m", [0, 1, 2])
def test_few_tokens(rewrite: Any, m: int) -> None:
    got = rewrite(Model(softmax), tokens(m, 32), tolerance=ROUNDING)
    assert got.of(PASS) == FIRED


def test_batch_invariant(rewrite: Any) -> None:
    options = {"compile_ext.batch_invariant": True}
    assert rewrite(Model(softmax), tokens(5, 32), tolerance=1e-4, options=options).of(PASS) == FIRED


@pytest.mark.parametrize("place", ["checkpoint", "cond", "after a graph break"])
def test_in_every_place(rewrite: Any, place: str) -> None:
    def body(logits: Tensor, bias: Tensor) -> Any:
        def inside(x: Tensor) -> Tensor:
            return dense(*softmax(router_gemm(x, torch.eye(N)), bias))

        if place == "checkpoint":
            return checkpoint(inside, logits, use_reentrant=False)
        if place == "cond":
            return torch.cond(logits.sum() > -1e9, inside, lambda x: x.sin(), (logits,))
        torch._dynamo.graph_break()
        return inside(logits)

    assert rewrite(Model(body), tokens(5, 32), tolerance=ROUNDING).of(PASS) == FIRED


def test_ties_go_to_the_first(rewrite: Any) -> None:
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    model = Model(softmax)
    model.w.data[:] = 1.0
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options=options)
        _, ids = compiled(tokens(3, 32))
    assert ids.tolist() == [[0, 1, 2, 3]] * 3


def test_under_inductor_with_the_numbers_checked() -> None:
    model, x = Model(grouped), tokens(5, 32)
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.check": True})
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=ROUNDING)


def test_numbers_that_are_inputs_of_the_graph_are_guarded_on() -> None:
    class Scaled(Model):
        scale = 2.5

        def forward(self, x: Tensor) -> Any:
            weights, ids = torch.topk(super().forward(x).softmax(-1), TOP_K)
            return weights * self.scale, ids

    model, x = Scaled(lambda logits, bias: logits), tokens(5, 32)
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    compiled = torch.compile(model, backend="compile_ext", options=options, dynamic=True)
    with torch.no_grad():
        for graphs, scale in ((1, 2.5), (2, 0.5), (2, 2.5)):
            model.scale = scale
            torch.testing.assert_close(compiled(x)[0], model(x)[0], rtol=0, atol=ROUNDING)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    said = [d for r in compile_ext.explain(compiled).rows for d in r.decisions]
    assert [d.fired for d in said if d.pass_name == PASS] == [True]


def test_explain_names_the_router() -> None:
    model = Model(softmax)
    with torch.no_grad():
        compiled = torch.compile(
            model, backend="compile_ext", options={"compile_ext.inner": "eager"}
        )
        compiled(tokens(5, 32))
    [row] = [r for r in compile_ext.explain(compiled).rows if r.site]
    said = [d.detail for d in row.decisions if d.pass_name == PASS]
    assert (row.module, row.op, said) == ("w", "compile_ext::router_gemm", [FIRED[0][1]])


def test_its_kernel_starts_while_the_router_runs(rewrite: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(triton_support, "has_pdl", lambda x: True)
    got = rewrite(Model(grouped), tokens(1, 32), tolerance=ROUNDING)
    said = "a kernel that can fetches the weight before its PDL wait"
    assert got.of("prefetch_weights")[-1] == (True, said)
    assert "-inf, True, 2.5, True)" in got.graph


def test_not_under_autocast(rewrite: Any) -> None:
    def body(logits: Tensor, bias: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return softmax(logits, bias)

    got = rewrite(Model(body), tokens(5, 32))
    assert got.of(PASS) == [(False, "it is inside an autocast region")]


def test_not_when_a_gradient_is_needed(rewrite: Any) -> None:
    def body(logits: Tensor, bias: Tensor) -> Any:
        weights, ids = (logits.detach() * 1.0).softmax(-1).topk(TOP_K)
        return weights, ids

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.scale = Model(body), nn.Parameter(torch.ones(TOP_K))
            self.router.requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            weights, ids = self.router(x)
            return weights * self.scale, ids

    got = rewrite(Trained(), tokens(5, 32), grad=True)
    assert got.of(PASS) == [(False, "it needs a gradient")]


def test_not_more_than_its_kernel_takes(rewrite: Any, monkeypatch: Any) -> None:
    definition = definition_of(ROUTER_TOPK)
    assert definition is not None
    reason = "takes top_k up to 3, found 4"
    monkeypatch.setattr(
        definition.kernels[0], "why_not", lambda x, bias, top_k, *_: reason if top_k > 3 else None
    )
    got = rewrite(Model(softmax), tokens(5, 32))
    assert got.of(PASS) == [(False, f"test: {reason}")]


class TestWithoutAKernel:
    @pytest.fixture
    def choice_kernel(self) -> None:
        """In the place of the kernel that the other tests see."""

    def test_not_where_the_op_would_run_its_reference(self, rewrite: Any) -> None:
        got = rewrite(Model(softmax), tokens(5, 32))
        assert got.of(PASS) == []
        assert "router_topk" not in got.graph
