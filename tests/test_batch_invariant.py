"""compile_ext.batch_invariant: a token's bits do not depend on the tokens beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import router_gemm

OPTIONS: dict[str, Any] = {"compile_ext.batch_invariant": True, "compile_ext.inner": "eager"}
# On the CPU torch.mm is what varies; K of 2000 makes 57 of M = 1..64 differ from M = 64 without the
# option.
K = 2000


class Gemms(nn.Module):
    """Each op by itself, so that no bits come from anything else."""

    def __init__(self, block: bool) -> None:
        super().__init__()
        self.block = BlockFp8Linear(torch.randn(50, K)) if block else None
        self.channel = ChannelFp8Linear(torch.randn(50, K))  # padded to 64
        self.router = nn.Parameter(torch.randn(8, K).bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [self.channel(x), router_gemm(x, self.router)]
        return [*found, self.block(x)] if self.block is not None else found


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="compile_ext", dynamic=True, options={**OPTIONS, **options})


def differing(call: Any, x: Tensor) -> list[int]:
    whole = call(x)
    return [
        m
        for m in range(1, 65)
        if not all(torch.equal(g, w[:m]) for g, w in zip(call(x[:m]), whole, strict=True))
    ]


@torch.no_grad()
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_one_token_and_many_have_the_same_bits(inner: str) -> None:
    """With a dynamic M, and the graph that Dynamo makes for M == 1. (bfloat16 into FP8 rounds one
    element at a time, so that Inductor's own kernels keep the bits here.)"""
    model, x = Gemms(block=True), torch.randn(64, K).bfloat16()
    call = compiled(model, **{"compile_ext.inner": inner})
    assert differing(call, x) == []
    rows = compile_ext.explain(model).rows
    assert {row.site.m for row in rows if row.site} == {(1, 1), (2, None)}
    assert {row.site.kernel for row in rows if row.site} == {"batch_invariant"}
    assert not any(row.op.endswith("_m1") for row in rows)


@torch.no_grad()
def test_without_the_option_they_have_not() -> None:
    model, x = Gemms(block=False), torch.randn(64, K).bfloat16()
    assert differing(compiled(model, **{"compile_ext.batch_invariant": False}), x) != []


@torch.no_grad()
def test_explain_says_what_was_left_alone_and_why() -> None:
    model, x = Gemms(block=False), torch.randn(1, K).bfloat16()
    compiled(model)(x)
    said = {
        (row.op, d.pass_name, d.fired, d.detail)
        for row in compile_ext.explain(model).rows
        for d in row.decisions
    }
    reason = "compile_ext.batch_invariant wants one op for every M"
    assert ("compile_ext::router_gemm", "specialize_m1", False, reason) in said
    for op in ("scaled_mm", "router_gemm"):
        assert (f"compile_ext::{op}", "pin_kernels", True, "kernel batch_invariant") in said


@torch.no_grad()
def test_a_gemm_of_another_library_is_reported() -> None:
    def call(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    a, b = (torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(2))
    look = compiled(call)  # type: ignore[arg-type]
    look(a, b, torch.ones(()))
    details = [d.detail for row in compile_ext.explain(call).rows for d in row.decisions]
    assert "compile_ext.batch_invariant does not reach this op" in details
