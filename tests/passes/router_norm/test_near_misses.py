"""Norms that lower_router_norm leaves alone, and why."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from routed_model import EPS, PASS, K, Layer, tokens
from torch import Tensor


def test_not_a_layer_norm(rewrite: Any) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        return self.route(F.layer_norm(x, (K,), self.w, None, EPS))

    (decision,) = rewrite(Layer(body), tokens(5, K)).of(PASS)
    assert decision[0] is False
    assert decision[1].startswith("no RMSNorm before it: ")


def test_not_where_others_read_what_is_in_between(rewrite: Any) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return self.route((normed * self.w).to(x.dtype)), normed.sum()

    got = rewrite(Layer(body), tokens(5, K))
    assert got.of(PASS) == [(False, "sum_1 reads a value inside the norm")]


def test_not_where_the_normed_activation_is_written(rewrite: Any) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        y = self.norm(x)
        logits = self.route(y)
        y.mul_(2.0)
        return logits, y

    got = rewrite(Layer(body), tokens(5, K))
    assert got.of(PASS) == [(False, "mul_ writes what it computes")]


def test_not_where_the_norm_reads_what_is_written_meanwhile(rewrite: Any) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        h = x.clone()
        wide = h.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        h.mul_(2.0)
        return self.route((h.float() * scale).to(x.dtype)), h

    ((fired, why),) = rewrite(Layer(body), tokens(5, K)).of(PASS)
    assert not fired
    assert why.startswith("no RMSNorm before it: ") or why == "mul_ writes what the norm reads"


def test_not_under_autocast(rewrite: Any) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.route(self.norm(x))

    got = rewrite(Layer(body), tokens(5, K))
    assert got.of(PASS) == [(False, "it is inside an autocast region")]
