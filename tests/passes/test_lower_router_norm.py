"""lower_router_norm: where it fires, what the graph looks like then, and when it stands back.

Spellings, near misses, attention residuals and the models of transformers are in ``router_norm/``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from routed_model import NORM, PASS, SUM, K, Layer, tokens
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import compile_ext

pytestmark = pytest.mark.usefixtures("router_norm_kernel")


def plain(self: Layer, x: Tensor) -> Any:
    y = self.norm(x)
    return self.route(y), self.experts(y)


def stream(self: Layer, x: Tensor, residual: Tensor) -> Any:
    h = residual + x
    y = self.llama_norm(h)
    logits = self.route(y.view(-1, K))
    return logits, h + self.experts(y)


def test_graph(rewrite: Any) -> None:
    got = rewrite(Layer(plain), tokens(5, K))
    assert got.of(PASS) == [NORM]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[5, 64]
arg1: bfloat16[64]
arg2: bfloat16[8, 64]
arg3: bfloat16[64, 64]
%0: bfloat16[5, 64] = compile_ext::rms_norm(arg0, arg1, 1e-06, False)
%1: float32[5, 8] = compile_ext::router_gemm(%0, arg2, None)
%2: bfloat16[5, 64] = linear(%0, arg3)
%3: bfloat16[5, 64] = silu(%2)
return [%1, %3]""",
    )


def test_graph_of_a_residual_stream(rewrite: Any) -> None:
    got = rewrite(Layer(stream), tokens(2, 3, K), tokens(2, 3, K))
    assert got.of(PASS) == [SUM]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[2, 3, 64]
arg1: bfloat16[2, 3, 64]
arg2: bfloat16[64]
arg3: bfloat16[8, 64]
arg4: bfloat16[64, 64]
%0: bfloat16[6, 64] = .reshape(arg0, -1, 64)
%1: bfloat16[6, 64] = .reshape(arg1, -1, 64)
%2 = compile_ext::add_rms_norm(%0, %1, arg2, 1e-06, True)
%3: bfloat16[6, 64] = getitem(%2, 0)
%4: bfloat16[2, 3, 64] = .view(%3, 2, 3, 64)
%5: bfloat16[6, 64] = getitem(%2, 1)
%6: bfloat16[2, 3, 64] = .view(%5, 2, 3, 64)
%7: float32[6, 8] = compile_ext::router_gemm(%3, arg3, None)
%8: bfloat16[2, 3, 64] = linear(%4, arg4)
%9: bfloat16[2, 3, 64] = silu(%8)
%10: bfloat16[2, 3, 64] = add(%6, %9)
return [%7, %10]""",
    )


def test_graph_of_one_token(rewrite: Any) -> None:
    got = rewrite(Layer(stream), tokens(1, 1, K), tokens(1, 1, K))
    assert got.of(PASS) == [SUM]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[1, 1, 64]
arg1: bfloat16[1, 1, 64]
arg2: bfloat16[64]
arg3: bfloat16[8, 64]
arg4: bfloat16[64, 64]
%0: bfloat16[1, 64] = .reshape(arg0, -1, 64)
%1: bfloat16[1, 64] = .reshape(arg1, -1, 64)
%2 = compile_ext::add_rms_norm(%0, %1, arg2, 1e-06, True)
%3: bfloat16[1, 64] = getitem(%2, 0)
%4: bfloat16[1, 1, 64] = .view(%3, 1, 1, 64)
%5: bfloat16[1, 64] = getitem(%2, 1)
%6: bfloat16[1, 1, 64] = .view(%5, 1, 1, 64)
%7: float32[1, 8] = compile_ext::router_gemm_m1(%3, arg3, None)
%8: bfloat16[1, 1, 64] = linear(%4, arg4)
%9: bfloat16[1, 1, 64] = silu(%8)
%10: bfloat16[1, 1, 64] = add(%6, %9)
return [%7, %10]""",
    )


def test_graph_with_dynamic_m(rewrite: Any) -> None:
    x, h = tokens(2, 3, K), tokens(2, 3, K)
    for t in (x, h):
        torch._dynamo.mark_dynamic(t, 0)
        torch._dynamo.mark_dynamic(t, 1)
    got = rewrite(Layer(stream), x, h)
    assert got.of(PASS) == [SUM]
    assert_expected_inline(
        got.graph,
        """\
arg2: bfloat16[s0, s1, 64]
arg3: bfloat16[s0, s1, 64]
arg4: bfloat16[64]
arg5: bfloat16[8, 64]
arg6: bfloat16[64, 64]
%0: bfloat16[s2, 64] = .reshape(arg2, -1, 64)
%1: bfloat16[s2, 64] = .reshape(arg3, -1, 64)
%2 = compile_ext::add_rms_norm(%0, %1, arg4, 1e-06, True)
%3: bfloat16[s2, 64] = getitem(%2, 0)
%4 = .size(arg2, 0)
%5 = .size(arg2, 1)
%6: bfloat16[s0, s1, 64] = .view(%3, %4, %5, 64)
%7: bfloat16[s2, 64] = getitem(%2, 1)
%8 = .size(arg2, 0)
%9 = .size(arg2, 1)
%10: bfloat16[s0, s1, 64] = .view(%7, %8, %9, 64)
%11: float32[s2, 8] = compile_ext::router_gemm(%3, arg5, None)
%12: bfloat16[s0, s1, 64] = linear(%6, arg6)
%13: bfloat16[s0, s1, 64] = silu(%12)
%14: bfloat16[s0, s1, 64] = add(%10, %13)
return [%11, %14]""",
    )


def test_dynamic_m_serves_every_m() -> None:
    x, h = tokens(1, 5, K), tokens(1, 5, K)
    for t in (x, h):
        torch._dynamo.mark_dynamic(t, 1)
    model = Layer(stream)
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    compiled = torch.compile(model, backend="compile_ext", options=options)
    with torch.no_grad():
        for pair in ((x, h), *((tokens(1, m, K), tokens(1, m, K)) for m in (8, 301))):
            for got, want in zip(compiled(*pair), model(*pair), strict=True):
                assert got.stride() == want.stride()
                assert torch.equal(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_under_inductor_with_the_numbers_checked() -> None:
    model, x, h = Layer(stream), tokens(2, 3, K), tokens(2, 3, K)
    options: dict[str, Any] = {"compile_ext.check": True}
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options=options)
        logits, out = compiled(x, h)
        want_logits, want = model(x, h)
    assert torch.equal(logits, want_logits)  # the ops run their references: eager's bits
    # Inductor's silu and sum are rounded once: 2^-8 of values up to 8.
    torch.testing.assert_close(out, want, rtol=0, atol=2.0**-5)


def test_several_layers(rewrite: Any) -> None:
    def body(self: Layer, x: Tensor, h: Tensor) -> Any:
        logits = []
        for _ in range(3):
            h = h + x
            y = self.llama_norm(h)
            logits.append(self.route(y))
            x = self.experts(y)
        return h, *logits

    got = rewrite(Layer(body), tokens(5, K), tokens(5, K))
    assert got.of(PASS) == [SUM] * 3
    assert got.graph.count("add_rms_norm(") == 3
    assert " add(" not in got.graph
    assert "rsqrt" not in got.graph


def test_a_residual_stream_that_is_written_in_place(rewrite: Any) -> None:
    """The norm reads what it holds then; later writes come after the op."""

    def body(self: Layer, x: Tensor) -> Any:
        h, logits = x.clone(), []
        for _ in range(2):
            h += 1.0
            y = self.llama_norm(h)
            logits.append(self.route(y))
            h += self.experts(y)
        return h, logits[-1]

    got = rewrite(Layer(body), tokens(5, K))
    assert got.of(PASS) == [NORM] * 2


def test_two_routers_of_one_norm(rewrite: Any) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        y = self.norm(x)
        return self.route(y), self.route(y * 1.0), self.route(y.view(1, -1, K))

    got = rewrite(Layer(body), tokens(5, K))
    assert got.of(PASS)[0] == NORM
    assert got.graph.count("compile_ext::rms_norm(") == 1


def test_a_router_in_float32(rewrite: Any) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        y = self.llama_norm(x)
        return self.route(y.float()), self.experts(y), y.float()

    assert rewrite(Layer(body), tokens(5, K)).of(PASS) == [NORM]


def test_a_model_in_float32(rewrite: Any) -> None:
    got = rewrite(Layer(plain, torch.float32), tokens(5, K).float())
    assert got.of(PASS) == [NORM]


def test_a_router_that_a_pass_has_found(rewrite: Any) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        y = self.llama_norm(x)
        scores = F.linear(y, self.router).softmax(-1, dtype=torch.float32)
        return scores, self.experts(y)

    # Eager rounds the logits to bfloat16 (2^-9 of at most 32), the op does not.
    got = rewrite(Layer(body), tokens(5, K), tolerance=32 * 2.0**-9)
    assert got.of(PASS) == [NORM]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[5, 64]
arg1: bfloat16[64]
arg2: bfloat16[8, 64]
arg3: bfloat16[64, 64]
%0: bfloat16[5, 64] = compile_ext::rms_norm(arg0, arg1, 1e-06, True)
%1: float32[5, 8] = compile_ext::router_gemm(%0, arg2, None)
%2: float32[5, 8] = .softmax(%1, -1, dtype=float32)
%3: bfloat16[5, 64] = linear(%0, arg3)
%4: bfloat16[5, 64] = silu(%3)
return [%2, %4]""",
    )


def test_idempotent(rewrite: Any) -> None:
    got = rewrite(Layer(stream), tokens(2, 3, K), tokens(2, 3, K))
    from compile_ext.passes import PassContext, run_passes

    before = got.graph
    ctx = PassContext(got.modules[-1], [tokens(1)] * 9)
    run_passes(ctx)
    assert got.graph == before
    assert [d for e in ctx.report.entries for d in e.decisions if d.pass_name == PASS] == []


def test_explain_names_the_norm_and_what_is_none() -> None:
    def body(self: Layer, x: Tensor) -> Any:
        return self.route(self.norm(x)), self.route(x.tanh())

    model = Layer(body)
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options=options)
        compiled(tokens(5, K))
    said = {
        (row.module, row.op, d.detail)
        for row in compile_ext.explain(compiled).rows
        for d in row.decisions
        if d.pass_name == PASS
    }
    why = "no RMSNorm before it: it has tanh where an RMSNorm has mul(..., ...)"
    assert ("w", "compile_ext::rms_norm", NORM[1]) in said
    assert said - {("w", "compile_ext::rms_norm", NORM[1])} == {
        ("router", "compile_ext::router_gemm", why)
    }


@pytest.mark.parametrize("place", ["checkpoint", "cond", "after a graph break"])
def test_in_every_place(rewrite: Any, place: str) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        def inside(x: Tensor) -> Tensor:
            return self.route(self.llama_norm(x))

        if place == "checkpoint":
            return checkpoint(inside, x, use_reentrant=False)
        if place == "cond":
            return torch.cond(x.sum() > -1e9, inside, lambda x: x[:, :8].float() * 2.0, (x,))
        torch._dynamo.graph_break()
        return inside(x)

    assert rewrite(Layer(body), tokens(5, K)).of(PASS) == [NORM]


class TestWithoutAKernel:
    @pytest.fixture
    def router_norm_kernel(self) -> None:
        """In the place of the kernel that the other tests see."""

    def test_not_where_the_op_would_run_its_reference(self, rewrite: Any) -> None:
        got = rewrite(Layer(stream), tokens(5, K), tokens(5, K))
        assert got.of(PASS) == []
        assert "rms_norm(" not in got.graph
