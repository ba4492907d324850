"""fuse_router: norm, router and choice of experts of one token become one op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import compile_ext
from compile_ext.ops import add_rms_norm, rms_norm, router_gemm, router_topk

pytestmark = pytest.mark.usefixtures("fused_kernel")
PASS = "fuse_router"
K, N, TOP_K = 64, 16, 4
TWO = "norm and router in one launch"
FIRED = [(True, TWO)]
WITH_SUM = [(True, f"residual, {TWO}")]
# The logits are those of the norm before it is rounded: by 2^-8 of the magnitudes, which add up to
# less than 64.
LOGITS = 64 * 2.0**-8


class Model(nn.Module):
    """``body(self, *activations)`` with the weights of a norm and a router."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.norm = nn.Parameter(torch.rand(K).bfloat16() + 0.5, requires_grad=False)
        self.w = nn.Parameter(torch.randn(N, K).bfloat16() / 4, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(N), requires_grad=False)
        self.choice_bias = nn.Parameter(torch.randn(N) / 8, requires_grad=False)

    def forward(self, *activations: Tensor) -> Any:
        return self.body(self, *activations)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def plain(m: Model, x: Tensor) -> Any:
    y = rms_norm(x, m.norm, 1e-6, True)
    return router_gemm(y, m.w, m.bias), y


def stream(m: Model, x: Tensor, h: Tensor) -> Any:
    y, total = add_rms_norm(x, h, m.norm, 1e-6, True)
    return router_gemm(y, m.w), y, total


def choosing(m: Model, x: Tensor, h: Tensor) -> Any:
    y, total = add_rms_norm(x, h, m.norm, 1e-6, True)
    weights, ids = router_topk(
        router_gemm(y, m.w), m.choice_bias, top_k=TOP_K, scores="sigmoid", groups=4, top_groups=2
    )
    return weights, ids, y, total


def test_graph(rewrite: Any) -> None:
    got = rewrite(Model(plain), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == FIRED
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[64]
arg1: bfloat16[1, 64]
arg2: bfloat16[16, 64]
arg3: float32[16]
%0 = compile_ext::rms_norm_router(arg1, None, arg0, 1e-06, True, arg2, arg3)
%1: bfloat16[1, 64] = getitem(%0, 0)
%2: float32[1, 16] = getitem(%0, 2)
return [%2, %1]""",
    )


def test_graph_of_a_residual_stream(rewrite: Any) -> None:
    got = rewrite(Model(stream), tokens(1, K), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == WITH_SUM
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[64]
arg1: bfloat16[1, 64]
arg2: bfloat16[1, 64]
arg3: bfloat16[16, 64]
%0 = compile_ext::rms_norm_router(arg1, arg2, arg0, 1e-06, True, arg3, None)
%1: bfloat16[1, 64] = getitem(%0, 0)
%2: bfloat16[1, 64] = getitem(%0, 1)
%3: float32[1, 16] = getitem(%0, 2)
return [%3, %1, %2]""",
    )


def test_graph_with_other_readers_and_views_of_the_norm(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x.view(-1, K), m.norm).view(1, 1, K)
        logits = router_gemm(y, m.w)
        return logits.softmax(-1), y @ m.w.t(), y.sin()

    got = rewrite(Model(body), tokens(1, 1, K), tolerance=LOGITS)
    assert got.of(PASS) == FIRED
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[1, 1, 64]
arg1: bfloat16[64]
arg2: bfloat16[16, 64]
%0: bfloat16[1, 64] = .view(arg0, -1, 64)
%1 = compile_ext::rms_norm_router(%0, None, arg1, 1e-06, False, arg2, None)
%2: bfloat16[1, 64] = getitem(%1, 0)
%3: float32[1, 16] = getitem(%1, 2)
%4: float32[1, 1, 16] = .view(%3, 1, 1, 16)
%5: bfloat16[1, 1, 64] = .view(%2, 1, 1, 64)
%6: float32[1, 1, 16] = .softmax(%4, -1)
%7: bfloat16[64, 16] = .t(arg2)
%8: bfloat16[1, 1, 16] = matmul(%5, %7)
%9: bfloat16[1, 1, 64] = .sin(%5)
return [%6, %8, %9]""",
    )


@pytest.mark.usefixtures("fused_choice_kernel")
def test_graph_with_the_choice_of_experts(rewrite: Any) -> None:
    got = rewrite(Model(choosing), tokens(1, K), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == [(True, "residual, norm, router and choice in one launch")]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[64]
arg1: bfloat16[1, 64]
arg2: bfloat16[1, 64]
arg3: bfloat16[16, 64]
arg4: float32[16]
%0 = compile_ext::rms_norm_router_topk(arg1, arg2, arg0, 1e-06, True, arg3, None, arg4, 4, sigmoid, 4, 2, -inf, True, 1.0)
%1: bfloat16[1, 64] = getitem(%0, 0)
%2: bfloat16[1, 64] = getitem(%0, 1)
%3: float32[1, 4] = getitem(%0, 2)
%4: int64[1, 4] = getitem(%0, 3)
return [%3, %4, %1, %2]""",  # noqa: E501
    )


def test_graph_where_no_kernel_makes_the_choice_too(rewrite: Any) -> None:
    got = rewrite(Model(choosing), tokens(1, K), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == WITH_SUM
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[64]
arg1: bfloat16[1, 64]
arg2: bfloat16[1, 64]
arg3: bfloat16[16, 64]
arg4: float32[16]
%0 = compile_ext::rms_norm_router(arg1, arg2, arg0, 1e-06, True, arg3, None)
%1: bfloat16[1, 64] = getitem(%0, 0)
%2: bfloat16[1, 64] = getitem(%0, 1)
%3: float32[1, 16] = getitem(%0, 2)
%4 = compile_ext::router_topk(%3, arg4, 4, sigmoid, 4, 2, -inf, True, 1.0)
%5: float32[1, 4] = getitem(%4, 0)
%6: int64[1, 4] = getitem(%4, 1)
return [%5, %6, %1, %2]""",
    )


@pytest.mark.usefixtures("fused_choice_kernel")
def test_the_choice_stays_where_others_read_the_logits(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        logits = router_gemm(rms_norm(x, m.norm), m.w)
        return *router_topk(logits, top_k=TOP_K), logits

    got = rewrite(Model(body), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == FIRED
    assert "compile_ext::router_topk(" in got.graph


@pytest.mark.usefixtures("fused_choice_kernel", "choice_kernel")
def test_the_choice_that_lower_router_topk_has_found(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        logits = router_gemm(rms_norm(x, m.norm), m.w)
        weights, ids = logits.softmax(-1).topk(TOP_K)
        return weights / weights.sum(-1, keepdim=True), ids

    got = rewrite(Model(body), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == [(True, "norm, router and choice in one launch")]
    assert "compile_ext::rms_norm_router_topk(" in got.graph
    assert "compile_ext::router" not in got.graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_logits_are_closer_to_exact(dtype: torch.dtype) -> None:
    model, x = Model(plain), tokens(1, K)
    model.w.data = model.w.data.to(dtype)
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options=options)
        (got, y), (want, want_y) = compiled(x), model(x)
    wide = x.double()
    normed = wide * (wide.square().mean() + 1e-6).rsqrt() * model.norm.double()
    exact = normed @ model.w.double().t() + model.bias
    magnitudes = normed.abs() @ model.w.double().abs().t() + model.bias.abs()
    assert torch.equal(y, want_y)
    assert bool(((got - exact).abs() <= 2.0**-20 * magnitudes).all())
    # Two roundings of the activation, by 2^-8 each.
    assert bool(((got - want).abs() <= 2.0**-7 * (1 + 2.0**-7) * magnitudes).all())


@pytest.mark.usefixtures("fused_choice_kernel")
def test_experts_are_those_of_two_ops_where_the_margin_is_larger_than_the_error() -> None:
    model = Model(choosing)
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    clear = 0
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options=options)
        for _ in range(50):
            x, h = tokens(1, K), tokens(1, K)
            (weights, ids, y, total), want = compiled(x, h), model(x, h)
            assert torch.equal(y, want[2])
            assert torch.equal(total, want[3])
            error = 2.0**-7 * (1 + 2.0**-7) * (y.double().abs() @ model.w.double().abs().t())
            if is_clear(router_gemm(y, model.w), error, model.choice_bias):
                clear += 1
                assert torch.equal(ids, want[1])
                # Of a sigmoid of logits that differ by the error; relative weights, so twice that.
                assert bool(((weights - want[0]).abs() <= 2 * float(error.max())).all())
    assert clear >= 5  # of 50 tokens, the experts of these are further apart than the error


def is_clear(logits: Tensor, error: Tensor, bias: Tensor) -> bool:
    """Whether every logit may move by its error, and no two of the chosen and no two groups, nor
    one of either and one that is left out, can change places."""
    low, high = ((logits + e).sigmoid() + bias for e in (-error, error))
    groups = [(x.view(4, -1).topk(2)[0].sum(-1)) for x in (low, high)]
    order = groups[0].argsort(descending=True)
    if groups[0][order[1]] <= groups[1][order[2]]:
        return False
    inside = order[:2].repeat_interleave(N // 4) * (N // 4) + torch.arange(N // 4).repeat(2)
    low, high = low[0, inside], high[0, inside]
    by_rank = low.argsort(descending=True)[: TOP_K + 1]
    return bool((low[by_rank[:-1]] > high[by_rank[1:]]).all())


def test_several_layers(rewrite: Any) -> None:
    def body(m: Model, x: Tensor, h: Tensor) -> Any:
        for _ in range(3):
            logits, y, h = stream(m, x, h)
            x = (y * logits.softmax(-1).amax()).to(x.dtype)
        return x, h

    got = rewrite(Model(body), tokens(1, K), tokens(1, K), tolerance=1.0)
    assert got.graph.count("compile_ext::rms_norm_router(") == 3
    assert "rms_norm(" not in got.graph


def test_idempotent(rewrite: Any) -> None:
    got = rewrite(Model(stream), tokens(1, K), tokens(1, K), tolerance=LOGITS)
    from compile_ext.passes import PassContext, run_passes

    before = got.graph
    run_passes(PassContext(got.modules[-1], [tokens(1)] * 4))
    assert got.graph == before


def test_under_inductor_with_the_numbers_checked() -> None:
    model, x, h = Model(stream), tokens(1, K), tokens(1, K)
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.check": True})
        for g, w in zip(compiled(x, h), model(x, h), strict=True):
            torch.testing.assert_close(g, w, rtol=0, atol=LOGITS)


def test_explain_shows_the_site() -> None:
    model = Model(stream)
    with torch.no_grad():
        compiled = torch.compile(
            model, backend="compile_ext", options={"compile_ext.inner": "eager"}
        )
        compiled(tokens(1, K), tokens(1, K))
    [row] = [r for r in compile_ext.explain(compiled).rows if r.site]
    assert (row.module, row.op) == ("w", "compile_ext::rms_norm_router")
    assert row.site is not None
    assert (row.site.m, row.site.n, row.site.k, row.site.kernel) == ((1, 1), N, K, "test")


def test_not_where_m_is_not_one(rewrite: Any) -> None:
    got = rewrite(Model(plain), tokens(2, K))
    assert got.of(PASS) == []
    assert "rms_norm_router" not in got.graph


def test_not_a_norm_of_others(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        return router_gemm(rms_norm(x, m.norm).sin(), m.w), router_gemm(x, m.w)

    assert rewrite(Model(body), tokens(1, K)).of(PASS) == []


def skipped(rewrite: Any, body: Callable[..., Any], **options: Any) -> str:
    """Why a body is left alone."""
    got = rewrite(Model(body), tokens(1, K), **options)
    fired, reason = got.of(PASS)[-1]
    assert not fired
    assert "rms_norm_router" not in got.graph
    return reason


@pytest.mark.parametrize("through_a_view", [False, True])
def test_not_where_the_norm_is_written(rewrite: Any, through_a_view: bool) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        (y.t() if through_a_view else y).mul_(2.0)
        return router_gemm(y, m.w), y

    assert skipped(rewrite, body) == "the graph writes the normed activation"


def router_m1(y: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """By hand: specialize_m1 leaves a weight alone that the graph computes or writes."""
    return torch.ops.compile_ext.router_gemm_m1(y, w, bias)


def test_not_where_a_weight_is_computed_behind_the_norm(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        return router_m1(y, (m.w * y.sum()).bfloat16()), y

    assert skipped(rewrite, body) == "b is computed behind the norm"


def test_a_weight_that_is_computed_before_the_norm(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        w = (m.w * x.sum()).bfloat16()
        return router_m1(rms_norm(x, m.norm), w)

    got = rewrite(Model(body), tokens(1, K), tolerance=8 * LOGITS)  # the sum is below 8
    assert got.of(PASS) == FIRED


def test_not_where_a_weight_is_written(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        logits = router_m1(y, m.w, m.bias)
        m.bias.mul_(1.0)
        return logits

    assert skipped(rewrite, body) == "the graph writes bias"


@pytest.mark.usefixtures("fused_choice_kernel")
def test_the_choice_stays_where_its_bias_is_written(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        chosen = router_topk(router_m1(rms_norm(x, m.norm), m.w), m.choice_bias, top_k=TOP_K)
        m.choice_bias.mul_(1.0)
        return chosen

    got = rewrite(Model(body), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == FIRED
    assert "compile_ext::router_topk(" in got.graph


def test_not_where_a_kernel_is_named(rewrite: Any) -> None:
    options = {"compile_ext.kernels": {"router_gemm": "reference"}}
    reason = skipped(rewrite, plain, options=options)
    assert reason == "compile_ext.kernels names a kernel of router_gemm"

    def body(m: Model, x: Tensor) -> Any:
        y = torch.ops.compile_ext.rms_norm(x, m.norm, 1e-6, True, pinned="reference")
        return router_gemm(y, m.w)

    assert skipped(rewrite, body) == "the call of rms_norm names reference"


def test_not_under_batch_invariant(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        return router_m1(y, m.w)

    reason = skipped(rewrite, body, tolerance=LOGITS, options={"compile_ext.batch_invariant": True})
    assert reason == "compile_ext.batch_invariant wants one op for every M"


def test_not_under_autocast(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        with torch.autocast("cpu", torch.bfloat16):
            return router_m1(y, m.w)

    assert skipped(rewrite, body) == "it is inside an autocast region"


@pytest.mark.usefixtures("router_norm_kernel")
def test_a_norm_of_what_a_norm_gives(rewrite: Any) -> None:
    """The second one's input is replaced before its own turn comes."""

    def body(m: Model, x: Tensor) -> Any:
        y = nn.functional.rms_norm(x, (K,), m.norm, 1e-6)
        first = nn.functional.linear(y, m.w).float()
        z = nn.functional.rms_norm(y, (K,), m.norm, 1e-6)
        return first, nn.functional.linear(z, m.w).float(), z

    got = rewrite(Model(body), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == [(True, TWO), (True, TWO)]
    assert got.graph.count("compile_ext::rms_norm_router(") == 2
    assert "compile_ext::rms_norm(" not in got.graph


class TestWithoutAKernel:
    @pytest.fixture
    def fused_kernel(self) -> None:
        """In the place of the kernel that the other tests see."""

    def test_not_where_the_op_would_run_its_reference(self, rewrite: Any) -> None:
        assert "triton: runs on CUDA" in skipped(rewrite, plain)
