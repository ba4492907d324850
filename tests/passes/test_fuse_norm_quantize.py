"""fuse_norm_quantize: where it fires, what the graph looks like then, and when it stands back.

Spellings and near misses are in ``norm_quantize/``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from norm_model import EPS, FIRED, PASS, WITH_SUM, K, Model, norm, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compile_ext
from compile_ext.ops import quantize_fp8_groups

FP8 = torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("norm_kernel")


def quantize(y: Tensor) -> tuple[Tensor, Tensor]:
    """Of any leading dimensions, with row-major scales."""
    grouped = y.float().unflatten(-1, (-1, 128))
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    return (grouped / scale).clamp(-448.0, 448.0).to(FP8).flatten(-2), scale.squeeze(-1)


def plain(x: Tensor, w: Tensor, linear: Tensor) -> Any:
    return quantize_fp8_groups(norm(x, w))


def stream(x: Tensor, h: Tensor, w: Tensor, linear: Tensor) -> Any:
    x = x + h
    return (*quantize_fp8_groups(norm(x, w).reshape(-1, K)), x * 2)


def test_graph(rewrite: Any) -> None:
    got = rewrite(Model(plain), tokens(5, K))
    assert got.of(PASS) == FIRED
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[256]
arg1: bfloat16[5, 256]
%0 = compile_ext::rms_norm_quantize_fp8(arg1, arg0, 1e-06, False)
%1: float8_e4m3fn[5, 256] = getitem(%0, 0)
%2: float32[5, 2] = getitem(%0, 1)
return [%1, %2]""",
    )


def test_graph_of_a_residual_stream(rewrite: Any) -> None:
    got = rewrite(Model(stream), tokens(2, 3, K), tokens(2, 3, K))
    assert got.of(PASS) == WITH_SUM
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[256]
arg1: bfloat16[2, 3, 256]
arg2: bfloat16[2, 3, 256]
%0: bfloat16[6, 256] = .reshape(arg1, -1, 256)
%1: bfloat16[6, 256] = .reshape(arg2, -1, 256)
%2 = compile_ext::add_rms_norm_quantize_fp8(%0, %1, arg0, 1e-06, False)
%3: float8_e4m3fn[6, 256] = getitem(%2, 0)
%4: float32[6, 2] = getitem(%2, 1)
%5: bfloat16[6, 256] = getitem(%2, 2)
%6: bfloat16[2, 3, 256] = .view(%5, 2, 3, 256)
%7: bfloat16[2, 3, 256] = mul(%6, 2)
return [%3, %4, %7]""",
    )


def test_graph_with_dynamic_m(rewrite: Any) -> None:
    x, h = tokens(2, 3, K), tokens(2, 3, K)
    for t in (x, h):
        torch._dynamo.mark_dynamic(t, 0)
        torch._dynamo.mark_dynamic(t, 1)
    got = rewrite(Model(stream), x, h)
    assert got.of(PASS) == WITH_SUM
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[256]
arg3: bfloat16[s0, s1, 256]
arg6: bfloat16[s0, s1, 256]
%0: bfloat16[s2, 256] = .reshape(arg3, -1, 256)
%1: bfloat16[s2, 256] = .reshape(arg6, -1, 256)
%2 = compile_ext::add_rms_norm_quantize_fp8(%0, %1, arg0, 1e-06, False)
%3: float8_e4m3fn[s2, 256] = getitem(%2, 0)
%4: float32[s2, 2] = getitem(%2, 1)
%5: bfloat16[s2, 256] = getitem(%2, 2)
%6 = .size(arg3, 0)
%7 = .size(arg3, 1)
%8: bfloat16[s0, s1, 256] = .view(%5, %6, %7, 256)
%9: bfloat16[s0, s1, 256] = mul(%8, 2)
return [%3, %4, %9]""",
    )


def test_graph_of_row_major_scales_of_any_leading_dimensions(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        return quantize(norm(x, w))

    x = tokens(2, 3, K)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    got = rewrite(Model(body), x)
    assert got.of(PASS) == FIRED
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[256]
arg3: bfloat16[s0, s1, 256]
%0: bfloat16[s2, 256] = .reshape(arg3, -1, 256)
%1 = compile_ext::rms_norm_quantize_fp8(%0, arg0, 1e-06, False)
%2: float8_e4m3fn[s2, 256] = getitem(%1, 0)
%3 = .size(arg3, 0)
%4 = .size(arg3, 1)
%5: float8_e4m3fn[s0, s1, 256] = .view(%2, %3, %4, 256)
%6: float32[s2, 2] = getitem(%1, 1)
%7 = .size(arg3, 0)
%8 = .size(arg3, 1)
%9: float32[s0, s1, 2] = .view(%6, %7, %8, 2)
%10: float32[s0, s1, 2] = .clone(%9, memory_format=contiguous_format)
return [%5, %10]""",
    )


def test_a_reader_that_cannot_tell_gets_the_scales_as_they_are(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        q, scale = quantize(norm(x, w))
        return q, scale.amax(-1)

    got = rewrite(Model(body), tokens(5, K))
    assert got.of(PASS) == FIRED
    assert "clone" not in got.graph


def test_graph_of_several_linears_that_quantize_one_activation(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        y = norm(x, w)
        (q, s), (q2, s2) = quantize_fp8_groups(y), quantize_fp8_groups(y)
        return q.float() * s.sum(), q2.float() + s2.sum()

    got = rewrite(Model(body), tokens(5, K))
    assert got.of(PASS) == [(True, "RMSNorm and 1x128 quantization (2 of them) in one op")]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[256]
arg1: bfloat16[5, 256]
%0 = compile_ext::rms_norm_quantize_fp8(arg1, arg0, 1e-06, False)
%1: float8_e4m3fn[5, 256] = getitem(%0, 0)
%2: float32[5, 2] = getitem(%0, 1)
%3: float32[5, 256] = .float(%1)
%4: float32[] = .sum(%2)
%5: float32[5, 256] = mul(%3, %4)
%6: float32[5, 256] = .float(%1)
%7: float32[] = .sum(%2)
%8: float32[5, 256] = add(%6, %7)
return [%5, %8]""",
    )


def test_graph_of_one_sum_with_two_norms(rewrite: Any) -> None:
    def body(x: Tensor, h: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x + h
        first, second = (quantize_fp8_groups(norm(x, v)) for v in (w, linear[0]))
        return *first, *second, x

    got = rewrite(Model(body), tokens(5, K), tokens(5, K))
    assert got.of(PASS) == WITH_SUM + FIRED
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[256]
arg1: bfloat16[16, 256]
arg2: bfloat16[5, 256]
arg3: bfloat16[5, 256]
%0 = compile_ext::add_rms_norm_quantize_fp8(arg2, arg3, arg0, 1e-06, False)
%1: float8_e4m3fn[5, 256] = getitem(%0, 0)
%2: float32[5, 2] = getitem(%0, 1)
%3: bfloat16[5, 256] = getitem(%0, 2)
%4: bfloat16[256] = getitem(arg1, 0)
%5 = compile_ext::rms_norm_quantize_fp8(%3, %4, 1e-06, False)
%6: float8_e4m3fn[5, 256] = getitem(%5, 0)
%7: float32[5, 2] = getitem(%5, 1)
return [%1, %2, %6, %7, %3]""",
    )


def test_several_layers(rewrite: Any) -> None:
    def body(x: Tensor, h: Tensor, w: Tensor, linear: Tensor) -> Any:
        for _ in range(3):
            x = x + h
            q, scale = quantize_fp8_groups(norm(x, w))
            h = F.silu(F.linear(q.bfloat16() * scale.amax().bfloat16(), linear)).repeat(1, 16)
        return x, h

    got = rewrite(Model(body), tokens(5, K), tokens(5, K))
    assert got.of(PASS) == WITH_SUM * 3
    assert got.graph.count("add_rms_norm_quantize_fp8(") == 3
    assert "rms_norm(" not in got.graph
    assert " add(" not in got.graph


def test_idempotent(rewrite: Any) -> None:
    got = rewrite(Model(stream), tokens(5, K), tokens(5, K))
    from compile_ext.passes import PassContext, run_passes

    before = got.graph
    run_passes(PassContext(got.modules[-1], [tokens(1)] * 3))
    assert got.graph == before


@pytest.mark.parametrize("m", [0, 1, 2])
def test_few_tokens(rewrite: Any, m: int) -> None:
    assert rewrite(Model(plain), tokens(m, K)).of(PASS) == FIRED


def test_dynamic_m_serves_every_m() -> None:
    x, h = tokens(5, K), tokens(5, K)
    for t in (x, h):
        torch._dynamo.mark_dynamic(t, 0)
    model = Model(stream)
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    compiled = torch.compile(model, backend="compile_ext", options=options)
    with torch.no_grad():
        for pair in ((x, h), *((tokens(m, K), tokens(m, K)) for m in (7, 301))):
            for g, w in zip(compiled(*pair), model(*pair), strict=True):
                assert g.stride() == w.stride()
                assert torch.equal(g.float(), w.float())
    # (Where m is a multiple of 4, quantize_fp8_groups guards on that.)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_under_inductor_with_the_numbers_checked() -> None:
    model, x, h = Model(stream), tokens(5, K), tokens(5, K)
    options: dict[str, Any] = {"compile_ext.check": True}
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options=options)
        for g, w in zip(compiled(x, h), model(x, h), strict=True):
            assert g.stride() == w.stride()
            assert torch.equal(g.float(), w.float())  # the op runs its reference: eager's bits


def test_a_weight_that_is_computed(rewrite: Any) -> None:
    def gemma(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
        return quantize_fp8_groups((y * (1.0 + w.float())).to(x.dtype))

    budget = {"compile_ext.memory_budget": 10**6}
    got = rewrite(Model(gemma), tokens(5, K), options=budget)
    assert got.of(PASS) == FIRED
    assert "add(" not in got.graph  # 1 + w is a derived constant by then


def test_a_weight_that_is_an_activation(rewrite: Any) -> None:
    def modulated(x: Tensor, v: Tensor, w: Tensor, linear: Tensor) -> Any:
        return quantize_fp8_groups(norm(x, v.tanh()))

    assert rewrite(Model(modulated), tokens(5, K), tokens(K)).of(PASS) == FIRED


def test_an_unaligned_k_is_padded_behind_it(rewrite: Any) -> None:
    ops = torch.ops.compile_ext_tests

    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        q, scale = quantize_fp8_groups(norm(x, w))
        return ops.gemm_fp8(q, linear, scale.sum())

    model = Model(body, k=201)
    model.linear = nn.Parameter(torch.randn(16, 201).to(FP8), requires_grad=False)
    got = rewrite(model, tokens(5, 201))
    assert got.of(PASS) == FIRED
    assert "K 201 -> 204" in str(got.of("fold_weight_padding"))


@pytest.mark.parametrize("place", ["checkpoint", "cond", "after a graph break"])
def test_in_every_place(rewrite: Any, place: str) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        def inside(x: Tensor) -> Tensor:
            q, scale = quantize_fp8_groups(norm(x, w))
            return q.float() * scale.sum()

        if place == "checkpoint":
            return checkpoint(inside, x, use_reentrant=False)
        if place == "cond":
            return torch.cond(x.sum() > -1e9, inside, lambda x: x.float() * w.sum(), (x,))
        torch._dynamo.graph_break()
        return inside(x)

    assert rewrite(Model(body), tokens(5, K)).of(PASS) == FIRED


def test_not_when_a_gradient_is_needed(rewrite: Any) -> None:
    got = rewrite(Model(plain), tokens(5, K), grad=True)
    assert got.of(PASS) == [(False, "it needs a gradient")]


def test_not_under_autocast(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return quantize_fp8_groups(norm(x, w))

    got = rewrite(Model(body), tokens(5, K))
    assert got.of(PASS) == [(False, "it is inside an autocast region")]


def test_not_where_an_input_of_the_graph_is_another_number(rewrite: Any) -> None:
    floor = [1e-12]

    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        grouped = norm(x, w).float().unflatten(-1, (-1, 128))
        scale = grouped.abs().amax(-1).clamp(min=floor[0]) / 448.0
        return (grouped / scale.unsqueeze(-1)).clamp(-448.0, 448.0).to(FP8), scale

    got = rewrite(Model(body), tokens(5, K), dynamic=True)
    found = "it has clamp(..., 1e-12, None) where quantize_fp8_groups has clamp(..., 1e-10, None)"
    assert got.of(PASS) == [(False, f"not the quantization of quantize_fp8_groups: {found}")]


def test_numbers_that_are_inputs_of_the_graph_are_guarded_on() -> None:
    # dynamic=True makes inputs of the floats that a model reads: the module constants of
    # quantize_fp8_groups, and an eps that may be another tomorrow.
    eps = [EPS]

    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps[0])
        return quantize_fp8_groups((y * w).to(x.dtype))

    model, x = Model(body), tokens(5, K) * 0.01
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    compiled = torch.compile(model, backend="compile_ext", options=options, dynamic=True)
    with torch.no_grad():
        for graphs, value in ((1, EPS), (2, 0.5), (2, EPS)):
            eps[0] = value
            (q, scale), (want, want_scale) = compiled(x), model(x)
            assert torch.equal(q.float(), want.float())
            assert torch.equal(scale, want_scale)
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    decisions = [d for r in compile_ext.explain(compiled).rows for d in r.decisions]
    assert [d.fired for d in decisions if d.pass_name == PASS] == [True]


def test_explain_names_the_norm() -> None:
    model = Model(plain)
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options=options)
        compiled(tokens(5, K))
    (row,) = [r for r in compile_ext.explain(compiled).rows if r.decisions]
    assert (row.module, row.op) == ("w", "compile_ext::rms_norm_quantize_fp8")


class TestWithoutAKernel:
    @pytest.fixture
    def norm_kernel(self) -> None:
        """In the place of the kernel that the other tests see."""

    def test_not_where_the_op_would_run_its_reference(self, rewrite: Any) -> None:
        got = rewrite(Model(stream), tokens(5, K), tokens(5, K))
        assert got.of(PASS) == []
        assert "compile_ext::" not in got.graph.replace("compile_ext::column_major", "")
