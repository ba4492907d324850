"""A choice of experts in every way that models write it: experts and weights are eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from choice_model import (
    GROUPS,
    PASS,
    ROUNDING,
    SCALE,
    TOP_GROUPS,
    TOP_K,
    Model,
    N,
    dense,
    grouped,
    softmax,
    tokens,
)
from torch import Tensor

ops = torch.ops.aten


def softmax_methods(x: Tensor, b: Tensor) -> Any:
    value, indices = x.softmax(-1).topk(TOP_K)
    return value.div_(value.sum(-1, keepdim=True)), indices


def softmax_out_of_place(x: Tensor, b: Tensor) -> Any:
    top = torch.topk(torch.softmax(x.float(), 1), k=TOP_K, dim=1, largest=True, sorted=True)
    return top.values / top.values.sum(dim=1).unsqueeze(1), top.indices


def softmax_div(x: Tensor, b: Tensor) -> Any:
    top = F.softmax(x, dim=1, dtype=torch.float32).topk(TOP_K, -1)
    return torch.div(top[0], torch.sum(top[0], -1, True)), top[1]


def softmax_in_aten(x: Tensor, b: Tensor) -> Any:
    value, indices = ops.topk.default(ops._softmax.default(x, -1, False), TOP_K)
    return ops.div.Tensor(value, ops.sum.dim_IntList(value, [-1], True)), indices


def softmax_then_gathered(x: Tensor, b: Tensor) -> Any:
    probs = x.softmax(-1)
    indices = probs.topk(TOP_K)[1]
    value = torch.gather(probs, -1, indices)
    return value / value.sum(-1, keepdim=True), indices


def softmax_chosen_by_logits(x: Tensor, b: Tensor) -> Any:
    indices = x.topk(TOP_K)[1]
    value = x.softmax(-1).gather(-1, indices)
    return value / (value.sum(-1, keepdim=True) + 1e-20), indices


def softmax_of_chosen(x: Tensor, b: Tensor) -> Any:
    value, indices = torch.topk(x, TOP_K, dim=-1)
    return F.softmax(value, dim=1), indices


def softmax_of_gathered(x: Tensor, b: Tensor) -> Any:
    indices = x.topk(TOP_K).indices
    return x.gather(1, indices).softmax(-1), indices


def softmax_as_it_is(x: Tensor, b: Tensor) -> Any:
    return tuple(torch.topk(x.softmax(-1), TOP_K))


def softmax_scaled(x: Tensor, b: Tensor) -> Any:
    value, indices = torch.topk(x.softmax(-1), TOP_K)
    return 2 * (SCALE / 2 * value), indices


def softmax_with_a_bias(x: Tensor, b: Tensor) -> Any:
    probs = x.softmax(-1)
    indices = (b + probs).topk(TOP_K)[1]
    value = probs.gather(-1, indices)
    return value / (value.sum(-1, keepdim=True) + 1e-20), indices


def sigmoid(x: Tensor, b: Tensor) -> Any:
    value, indices = torch.topk(torch.sigmoid(x), TOP_K)
    return value / (value.sum(-1, keepdim=True) + 1e-20), indices


def sigmoid_with_a_bias(x: Tensor, b: Tensor) -> Any:
    scores = F.sigmoid(x)
    indices = torch.topk(scores + b.unsqueeze(0).float(), TOP_K)[1]
    return scores.gather(1, indices) * SCALE, indices


def one_group(x: Tensor, b: Tensor) -> Any:
    """GLM-4-MoE: n_group = topk_group = 1."""
    scores = x.sigmoid()
    biased = scores + b
    best = biased.view(-1, 1, N).topk(2, dim=-1)[0].sum(dim=-1)
    idx = torch.topk(best, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best)
    mask.scatter_(1, idx, 1)
    mask = mask.unsqueeze(-1).expand(-1, 1, N).reshape(-1, N)
    biased = biased.masked_fill(~mask.bool(), float("-inf"))
    indices = torch.topk(biased, k=TOP_K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, indices)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return dense(weights * SCALE, indices)


def grouped_of_transformers_4(x: Tensor, b: Tensor) -> Any:
    scores = x.sigmoid()
    with torch.no_grad():
        biased = scores.view(-1, N) + b.unsqueeze(0)
        best = biased.view(-1, GROUPS, N // GROUPS).topk(2, dim=-1)[0].sum(dim=-1)
        idx = torch.topk(best, k=TOP_GROUPS, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(best)
        mask.scatter_(1, idx, 1)
        mask = mask.unsqueeze(-1).expand(-1, GROUPS, N // GROUPS).reshape(-1, N)
        biased = biased.masked_fill(~mask.bool(), 0.0)
        indices = torch.topk(biased, k=TOP_K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, indices)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return dense(weights * SCALE, indices)


def grouped_with_another_mask(x: Tensor, b: Tensor) -> Any:
    scores = x.sigmoid()
    biased = (scores + b).unflatten(-1, (GROUPS, -1))
    idx = biased.topk(2).values.sum(-1).topk(TOP_GROUPS).indices
    mask = torch.zeros(x.shape[0], GROUPS, dtype=torch.bool).scatter(-1, idx, True)
    biased = torch.where(mask[..., None], biased, -torch.inf).flatten(-2)
    indices = biased.topk(TOP_K)[1]
    weights = scores.gather(-1, indices)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * SCALE, indices


def grouped_in_place(x: Tensor, b: Tensor) -> Any:
    """Every step writes where it can, and nobody takes what a write gives."""
    scores = x.sigmoid()
    biased = scores + b
    best = biased.view(-1, GROUPS, N // GROUPS).topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros(x.shape[0], GROUPS)
    mask.scatter_(1, best.topk(TOP_GROUPS)[1], 1.0)
    mask = mask.unsqueeze(-1).expand(-1, GROUPS, N // GROUPS).reshape(-1, N)
    biased.masked_fill_(mask == 0, -torch.inf)
    indices = biased.topk(TOP_K)[1]
    weights = scores.gather(1, indices)
    weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))
    weights.mul_(SCALE)
    return weights, indices


SPELLINGS = {f.__name__: f for f in (
    softmax, softmax_methods, softmax_out_of_place, softmax_div, softmax_in_aten,
    softmax_then_gathered, softmax_chosen_by_logits, softmax_of_chosen, softmax_of_gathered,
    softmax_as_it_is, softmax_scaled, softmax_with_a_bias, sigmoid, sigmoid_with_a_bias,
    grouped, one_group, grouped_of_transformers_4, grouped_with_another_mask, grouped_in_place,
)}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_spelling(rewrite: Any, spelling: str, dynamic: bool) -> None:
    got = rewrite(Model(SPELLINGS[spelling]), tokens(50, 32), tolerance=ROUNDING, dynamic=dynamic)
    [(fired, said)] = got.of(PASS)
    assert fired, said
    assert said.startswith("top 4 of 24, s")
    for name in ("topk(%", "softmax(%", "sigmoid(%", "gather(%", "div(", "sum(", "_("):
        left = [x for x in got.graph.splitlines() if name in x and "compile_ext::" not in x]
        assert left == [], got.graph
