"""What the tests of lower_router_topk build their graphs from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PASS = "lower_router_topk"
N, K, TOP_K, GROUPS, TOP_GROUPS, SCALE = 24, 32, 4, 4, 2, 2.5
# exp, sums and quotients in float32, each rounded once or twice more than in eager mode, of weights
# up to SCALE.
ROUNDING = 8 * 2.0**-24 * SCALE


class Model(nn.Module):
    """``body(logits, bias)`` behind a router."""

    def __init__(self, body: Callable[..., Any], n: int = N) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.randn(n, K).bfloat16() / 4)
        self.bias: Tensor
        self.register_buffer("bias", torch.randn(n) / 8)

    def forward(self, x: Tensor) -> Any:
        return self.body(torch.ops.compile_ext.router_gemm(x, self.w, None), self.bias)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def dense(weights: Tensor, ids: Tensor) -> Tensor:
    """The weight of each expert: without an order, which ``sorted=False`` leaves open."""
    return weights.new_zeros(weights.shape[0], N).scatter(1, ids, weights)


def softmax(logits: Tensor, bias: Tensor) -> Any:
    """Qwen3-MoE and Mixtral in transformers 5."""
    probs = torch.nn.functional.softmax(logits, dtype=torch.float, dim=-1)
    value, indices = torch.topk(probs, TOP_K, dim=-1)
    value /= value.sum(dim=-1, keepdim=True)
    return value, indices


def grouped(logits: Tensor, bias: Tensor) -> Any:
    """DeepSeek-V3 and GLM-4-MoE in transformers 5."""
    scores = logits.sigmoid()
    scores_for_choice = scores + bias
    group_scores = scores_for_choice.view(-1, GROUPS, N // GROUPS).topk(2, dim=-1)[0].sum(dim=-1)
    group_idx = torch.topk(group_scores, k=TOP_GROUPS, dim=-1, sorted=False)[1]
    group_mask = torch.zeros_like(group_scores)
    group_mask.scatter_(1, group_idx, 1)
    score_mask = group_mask.unsqueeze(-1).expand(-1, GROUPS, N // GROUPS).reshape(-1, N)
    scores_for_choice = scores_for_choice.masked_fill(~score_mask.bool(), float("-inf"))
    topk_indices = torch.topk(scores_for_choice, k=TOP_K, dim=-1, sorted=False)[1]
    topk_weights = scores.gather(1, topk_indices)
    denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
    topk_weights /= denominator
    topk_weights = topk_weights * SCALE
    return dense(topk_weights, topk_indices)
