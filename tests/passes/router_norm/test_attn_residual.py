"""Attention residuals before the norm of a router: one op, with eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from routed_model import EPS, MIXTURE, NORM, PASS, SUM, K, Layer, tokens
from torch import Tensor


def mixture(self: Layer, prefix: Tensor, blocks: Tensor) -> Tensor:
    """As Kimi K3's model code spells it."""
    v = torch.cat((blocks, prefix.unsqueeze(1)), dim=1)
    wide = v.float()
    k = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    scores = (k * (self.key.float() * self.query.squeeze(0).float())).sum(-1)
    mixed = torch.matmul(scores.softmax(-1).unsqueeze(1), wide).squeeze(1)
    return mixed.to(v.dtype)


def layer(self: Layer, prefix: Tensor, blocks: Tensor) -> Any:
    b, s, k = prefix.shape
    mixed = mixture(self, prefix.view(-1, k), blocks).view(b, s, k)
    y = self.llama_norm(mixed)
    return self.route(y.view(-1, k)), prefix + self.experts(y)


BUDGET = {"compile_ext.memory_budget": 2**20}


def test_graph(rewrite: Any) -> None:
    got = rewrite(Layer(layer), tokens(2, 3, K), tokens(6, 4, K), options=BUDGET)
    assert got.of(PASS) == [MIXTURE]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[2, 3, 64]
arg1: bfloat16[6, 4, 64]
arg4: bfloat16[64]
arg5: bfloat16[8, 64]
arg6: bfloat16[64, 64]
arg7: float32[64] = float, squeeze, float, mul
%0: bfloat16[6, 64] = .reshape(arg0, -1, 64)
%1 = compile_ext::attn_residual(%0, arg1, arg7, 1e-06, arg4, 1e-06, True)
%2: bfloat16[6, 64] = getitem(%1, 0)
%3: bfloat16[2, 3, 64] = .view(%2, 2, 3, 64)
%4: float32[6, 8] = compile_ext::router_gemm(%2, arg5, None)
%5: bfloat16[2, 3, 64] = linear(%3, arg6)
%6: bfloat16[2, 3, 64] = silu(%5)
%7: bfloat16[2, 3, 64] = add(arg0, %6)
return [%4, %7]""",
    )


def test_graph_with_dynamic_m(rewrite: Any) -> None:
    prefix, blocks = tokens(2, 3, K), tokens(6, 4, K)
    for t, dims in ((prefix, (0, 1)), (blocks, (0,))):
        for dim in dims:
            torch._dynamo.mark_dynamic(t, dim)
    got = rewrite(Layer(layer), prefix, blocks, options=BUDGET)
    assert got.of(PASS) == [MIXTURE]
    assert_expected_inline(
        got.graph,
        """\
arg2: bfloat16[s0, s1, 64]
arg3: bfloat16[s2, 4, 64]
arg6: bfloat16[64]
arg7: bfloat16[8, 64]
arg8: bfloat16[64, 64]
arg9: float32[64] = float, squeeze, float, mul
%0: bfloat16[s2, 64] = .reshape(arg2, -1, 64)
%1 = compile_ext::attn_residual(%0, arg3, arg9, 1e-06, arg6, 1e-06, True)
%2: bfloat16[s2, 64] = getitem(%1, 0)
%3: bfloat16[s0, s1, 64] = .view(%2, arg0, arg1, 64)
%4: float32[s2, 8] = compile_ext::router_gemm(%2, arg7, None)
%5: bfloat16[s0, s1, 64] = linear(%3, arg8)
%6: bfloat16[s0, s1, 64] = silu(%5)
%7: bfloat16[s0, s1, 64] = add(arg2, %6)
return [%4, %7]""",
    )


def test_one_token(rewrite: Any) -> None:
    got = rewrite(Layer(layer), tokens(1, 1, K), tokens(1, 4, K), options=BUDGET)
    assert got.of(PASS) == [MIXTURE]
    assert "router_gemm_m1(" in got.graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_in_each_dtype(rewrite: Any, dtype: torch.dtype) -> None:
    def body(self: Layer, prefix: Tensor, blocks: Tensor) -> Any:
        y = self.llama_norm(mixture(self, prefix, blocks))
        return self.route(y.float()), y

    args = tokens(5, K).to(dtype), tokens(5, 4, K).to(dtype)
    assert rewrite(Layer(body, dtype), *args, options=BUDGET).of(PASS) == [MIXTURE]


def test_a_decoder(rewrite: Any) -> None:
    """A block boundary, then two layers that add to one sum: the boundary's cat is another one."""

    def body(self: Layer, x: Tensor, blocks: Tensor) -> Any:
        prefix, logits = x, []
        for i in range(3):
            if i == 1:
                blocks = torch.cat((blocks, prefix.unsqueeze(1)), dim=1)
                prefix = self.experts(x)
            y = self.llama_norm(mixture(self, prefix, blocks))
            logits.append(self.route(y))
            prefix = prefix + self.experts(y)
        return prefix, *logits

    got = rewrite(Layer(body), tokens(5, K), tokens(5, 2, K), options=BUDGET)
    assert got.of(PASS) == [MIXTURE] * 3
    assert got.graph.count("attn_residual(") == 3
    assert got.graph.count(" cat(") == 1
    assert "softmax" not in got.graph


def test_the_mixture_has_other_readers(rewrite: Any) -> None:
    def body(self: Layer, prefix: Tensor, blocks: Tensor) -> Any:
        mixed = mixture(self, prefix, blocks)
        return self.route(self.norm(mixed)), mixed + 1.0

    got = rewrite(Layer(body), tokens(5, K), tokens(5, 4, K), options=BUDGET)
    assert got.of(PASS) == [MIXTURE]


def test_without_the_budget_the_query_is_computed_in_the_graph(rewrite: Any) -> None:
    got = rewrite(
        Layer(layer), tokens(2, 3, K), tokens(6, 4, K), options={"compile_ext.memory_budget": 0}
    )
    assert got.of(PASS) == [MIXTURE]
    assert "mul(" in got.graph


def stacked(self: Layer, values: Tensor) -> Tensor:
    """v is no cat, but all that the layers gave, in one tensor."""
    wide = values.float()
    k = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    scores = (k * (self.key.float() * self.query.squeeze(0).float())).sum(-1)
    return torch.matmul(scores.softmax(-1).unsqueeze(1), wide).squeeze(1).to(values.dtype)


def test_graph_of_what_is_stacked_already(rewrite: Any) -> None:
    def body(self: Layer, values: Tensor) -> Any:
        return self.route(self.norm(stacked(self, values)))

    got = rewrite(Layer(body), tokens(5, 4, K), options=BUDGET)
    assert got.of(PASS) == [MIXTURE]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[5, 4, 64]
arg3: bfloat16[64]
arg4: bfloat16[8, 64]
arg5: float32[64] = float, squeeze, float, mul
%0: bfloat16[5, 64] = .select(arg0, 1, 3)
%1: bfloat16[5, 3, 64] = .narrow(arg0, 1, 0, 3)
%2 = compile_ext::attn_residual(%0, %1, arg5, 1e-06, arg3, 1e-06, False)
%3: bfloat16[5, 64] = getitem(%2, 0)
%4: float32[5, 8] = compile_ext::router_gemm(%3, arg4, None)
return [%4]""",
    )


def test_what_is_written_since_it_was_copied(rewrite: Any) -> None:
    """The op reads the copy: its parts hold something else by then."""

    def body(self: Layer, prefix: Tensor, blocks: Tensor) -> Any:
        prefix = prefix + 1.0
        v = torch.cat((blocks, prefix.unsqueeze(1)), dim=1)
        prefix.mul_(2.0)
        return self.route(self.norm(stacked(self, v))), prefix

    got = rewrite(Layer(body), tokens(5, K), tokens(5, 4, K), options=BUDGET)
    assert got.of(PASS) == [MIXTURE]
    assert " cat(" in got.graph


def test_what_is_read_in_between_leaves_the_norm(rewrite: Any) -> None:
    def body(self: Layer, prefix: Tensor, blocks: Tensor) -> Any:
        v = torch.cat((blocks, prefix.unsqueeze(1)), dim=1)
        wide = v.float()
        k = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        weights = (k * self.key.float()).sum(-1).softmax(-1)
        mixed = torch.matmul(weights.unsqueeze(1), wide).squeeze(1).to(v.dtype)
        return self.route(self.norm(mixed)), weights

    got = rewrite(Layer(body), tokens(5, K), tokens(5, 4, K), options=BUDGET)
    why = "output reads a value inside the attention residuals"
    assert got.of(PASS) == [(True, f"{NORM[1]}; the attention residuals stay: {why}")]


def test_another_mixture_leaves_the_norm(rewrite: Any) -> None:
    """A mean, and no softmax; of the attention of a layer, the sum with the residual is not one."""

    def body(self: Layer, prefix: Tensor, blocks: Tensor) -> Any:
        mean = torch.cat((blocks, prefix.unsqueeze(1)), dim=1).mean(1)
        total = prefix + mixture(self, prefix, blocks)
        return self.route(self.norm(mean)), self.route(self.norm(total))

    got = rewrite(Layer(body), tokens(5, K), tokens(5, 4, K), options=BUDGET)
    assert got.of(PASS) == [NORM, SUM]


def test_under_inductor() -> None:
    model, args = Layer(layer), (tokens(2, 3, K), tokens(6, 4, K))
    options: dict[str, Any] = {"compile_ext.check": True, **BUDGET}
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options=options)
        logits, _ = compiled(*args)
        assert torch.equal(logits, model(*args)[0])  # the ops run their references: eager's bits
