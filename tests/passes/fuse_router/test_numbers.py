"""What fuse_router changes in the numbers: logits closer to exact, and the same experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_model import (
    TOP_K,
    K,
    Model,
    N,
    choosing,
    plain,
    tokens,
)
from torch import Tensor

from compile_ext.ops import router_gemm

pytestmark = pytest.mark.usefixtures("fused_kernel")


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
