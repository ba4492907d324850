"""fuse_router: norm, router and choice of experts of one token become one op.

Numbers, near misses and the models of transformers are in ``fuse_router/``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from fused_model import (
    FIRED,
    LOGITS,
    PASS,
    TOP_K,
    TWO,
    WITH_SUM,
    K,
    Model,
    N,
    choosing,
    plain,
    router_m1,
    stream,
    tokens,
)
from torch import Tensor

import compile_ext
from compile_ext.ops import rms_norm, router_gemm, router_topk

pytestmark = pytest.mark.usefixtures("fused_kernel")


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


def test_a_weight_that_is_computed_before_the_norm(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        w = (m.w * x.sum()).bfloat16()
        return router_m1(rms_norm(x, m.norm), w)

    got = rewrite(Model(body), tokens(1, K), tolerance=8 * LOGITS)  # the sum is below 8
    assert got.of(PASS) == FIRED


@pytest.mark.usefixtures("router_norm_kernel")
def test_a_norm_of_what_a_norm_gives(rewrite: Any) -> None:
    """The second one's input is replaced before its own turn comes."""

    def body(m: Model, x: Tensor) -> Any:
        y = torch.nn.functional.rms_norm(x, (K,), m.norm, 1e-6)
        first = torch.nn.functional.linear(y, m.w).float()
        z = torch.nn.functional.rms_norm(y, (K,), m.norm, 1e-6)
        return first, torch.nn.functional.linear(z, m.w).float(), z

    got = rewrite(Model(body), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == [(True, TWO), (True, TWO)]
    assert got.graph.count("compile_ext::rms_norm_router(") == 2
    assert "compile_ext::rms_norm(" not in got.graph
