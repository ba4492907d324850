"""Who else reads or writes what the op would take the place of, and the sum before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_model import EPS, FIRED, PASS, WITH_SUM, K, Model, norm, tokens
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from compile_ext.ops import quantize_fp8_groups


# ---- who else reads ------------------------------------------------------------------------------
def test_not_when_others_read_the_normed_activation(rewrite: Any) -> None:
    def routed(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        y = norm(x, w)
        return *quantize_fp8_groups(y), F.linear(y, linear).float().softmax(-1)

    # Eager rounds the logits to bfloat16, router_gemm does not.
    got = rewrite(Model(routed), tokens(5, K), tolerance=2.0**-7)
    assert got.of(PASS) == [(False, "linear reads the normed activation")]
    assert "router_gemm" in got.graph


OTHER_READERS = {
    "output reads the normed activation": lambda y, s, wide, r: y,
    "other reads a value inside the norm": lambda y, s, wide, r: r.abs(),
}


@pytest.mark.parametrize("reason", OTHER_READERS)
def test_not_when_others_read_what_is_in_between(rewrite: Any, reason: str) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        wide = x.float()
        r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        other = OTHER_READERS[reason](None, None, wide, r) if "inside" in reason else None
        y = (wide * r * w).to(x.dtype)
        q, scale = quantize_fp8_groups(y)
        return q, scale, y if other is None else other

    assert rewrite(Model(body), tokens(5, K)).of(PASS) == [(False, reason)]


def test_others_may_read_x_in_float32(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        wide = x.float()
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * w).to(x.dtype)
        return *quantize_fp8_groups(y), wide.sin()

    assert rewrite(Model(body), tokens(5, K)).of(PASS) == FIRED


def test_not_when_the_graph_hands_out_two_tensors_that_would_be_one(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        y = norm(x, w)
        return *quantize_fp8_groups(y), *quantize_fp8_groups(y)

    got = rewrite(Model(body), tokens(5, K))
    assert got.of(PASS) == [(False, "the graph hands out two tensors that would be one")]
    assert "compile_ext::" not in got.graph.replace("compile_ext::column_major", "")


# ---- writes --------------------------------------------------------------------------------------
def test_a_residual_stream_in_place(rewrite: Any) -> None:
    def body(x: Tensor, h: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x.clone()
        results = []
        for _ in range(2):
            x += h
            results += quantize_fp8_groups(norm(x, w))
        x += h
        return *results, x

    got = rewrite(Model(body), tokens(5, K), tokens(5, K))
    assert got.of(PASS) == FIRED * 2  # the sums stay as they are


def test_not_when_x_is_written_in_between(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x.clone()
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
        x.mul_(2)
        return quantize_fp8_groups((x.float() * r * w).to(x.dtype))

    got = rewrite(Model(body), tokens(5, K))
    assert got.of(PASS) == [(False, "mul_ writes what the norm reads")]


WRITES = {  # each leaves x and what the norm reads apart
    "a copy, before the norm": lambda x, c: c.mul_(2),
    "the original of a copy": lambda x, c: x.mul_(2),
}


@pytest.mark.parametrize("case", WRITES)
def test_not_when_a_copy_is_written(rewrite: Any, case: str) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x.sin()
        copy = x.clone()
        WRITES[case](x, copy)
        return quantize_fp8_groups(norm(copy, w))

    got = rewrite(Model(body), tokens(5, K))
    assert got.of(PASS) == [(False, "mul_ writes what the norm reads")]


def test_another_copy_may_be_written(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x.sin()
        other = x.clone()
        copy = x.clone()
        other.mul_(2)
        return *quantize_fp8_groups(norm(copy, w)), other

    assert rewrite(Model(body), tokens(5, K)).of(PASS) == FIRED


def test_not_when_the_second_norm_reads_a_written_x(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x.clone()
        q, scale = quantize_fp8_groups(norm(x, w))
        x.mul_(-1)
        q2, scale2 = quantize_fp8_groups(norm(x, w))
        return q.float() * scale.sum(), q2.float() * scale2.sum()

    got = rewrite(Model(body), tokens(5, K))
    assert got.of(PASS) == [(False, "mul_ writes what the norm reads")]


def test_not_when_the_result_is_written(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        q, scale = quantize_fp8_groups(norm(x, w))
        scale.mul_(2)
        return q, scale

    got = rewrite(Model(body), tokens(5, K))
    assert got.of(PASS) == [(False, "mul_ writes what it computes")]


def test_not_when_a_body_writes_x_in_between(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x.sin()
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
        checkpoint(lambda t: t.mul_(2).sum(), x, use_reentrant=False)
        return quantize_fp8_groups((x.float() * r * w).to(x.dtype))

    got = rewrite(Model(body), tokens(5, K))
    reason = "a body of a higher-order op writes what it reads or gives"
    assert got.of(PASS) == [(False, reason)]


def test_the_sum_stays_where_it_is_written_before_the_norm(rewrite: Any) -> None:
    def body(x: Tensor, h: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x + h
        x.mul_(2)
        return *quantize_fp8_groups(norm(x, w)), x

    assert rewrite(Model(body), tokens(5, K), tokens(5, K)).of(PASS) == FIRED


def test_a_buffer_that_is_read_before_it_is_filled_stays(rewrite: Any) -> None:
    def body(x: Tensor, w: Tensor, linear: Tensor) -> Any:
        out = torch.empty(5, 2)
        early = torch.zeros_like(out)
        q, scale = quantize_fp8_groups(norm(x, w))
        out.copy_(scale)
        return q, out, early

    got = rewrite(Model(body), tokens(5, K))
    assert got.of(PASS) == FIRED
    assert ".copy_(" in got.graph


def test_x_may_be_written_afterwards(rewrite: Any) -> None:
    def body(x: Tensor, h: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x + h
        q, scale = quantize_fp8_groups(norm(x, w))
        x.mul_(2)
        return q, scale, x

    got = rewrite(Model(body), tokens(5, K), tokens(5, K))
    assert got.of(PASS) == WITH_SUM


# ---- the residual --------------------------------------------------------------------------------
RESIDUALS = {
    "operator": (lambda x, h: x + h, WITH_SUM),
    "method": (lambda x, h: x.add(h), WITH_SUM),
    "torch.add": (lambda x, h: torch.add(x, h), WITH_SUM),
    "overload": (lambda x, h: torch.ops.aten.add.Tensor(x, h), WITH_SUM),
    "alpha": (lambda x, h: torch.add(x, h, alpha=2), FIRED),
    "of one": (lambda x, h: x + x, FIRED),
    "a row": (lambda x, h: x + h[:1], FIRED),
    "a number": (lambda x, h: x + 1.0, FIRED),
    "rounded later": (lambda x, h: (x.float() + h.float()).bfloat16(), FIRED),
    "a difference": (lambda x, h: x - h, FIRED),
}


@pytest.mark.parametrize("case", RESIDUALS)
def test_residual(rewrite: Any, case: str) -> None:
    add, want = RESIDUALS[case]

    def body(x: Tensor, h: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = add(x, h)
        return *quantize_fp8_groups(norm(x, w)), x

    assert rewrite(Model(body), tokens(5, K), tokens(5, K)).of(PASS) == want


def test_the_sum_stays_where_the_weight_comes_later(rewrite: Any) -> None:
    def body(x: Tensor, h: Tensor, w: Tensor, linear: Tensor) -> Any:
        x = x + h
        return *quantize_fp8_groups(norm(x, h[0].tanh())), x

    assert rewrite(Model(body), tokens(5, K), tokens(5, K)).of(PASS) == FIRED
