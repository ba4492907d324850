"""What the tests of fuse_router build their graphs from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compile_ext.ops import add_rms_norm, rms_norm, router_gemm, router_topk

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


def router_m1(y: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """By hand: specialize_m1 leaves a weight alone that the graph computes or writes."""
    return torch.ops.compile_ext.router_gemm_m1(y, w, bias)
