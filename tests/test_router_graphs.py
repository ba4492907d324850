"""How many graphs a router costs over M = 1..64: Dynamo's two, or one under mark_unbacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compile_ext
from compile_ext.ops import checks
from compile_ext.ops.router_gemm_spec import KERNELS, router_gemm_ref

TOKENS = (5, *range(1, 65))  # the first call, then each M


class Router(nn.Module):
    """As in Qwen3-MoE and Mixtral, with the norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64).bfloat16().requires_grad_(False)
        self.weight = nn.Parameter(torch.randn(16, 64).bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.norm(x)
        logits = F.linear(x, self.weight).float()
        return x, logits, logits.softmax(-1).topk(4)[0]


def call_with_each_m(model: Router, call: Any, *, unbacked: bool) -> None:
    """And compare the values."""
    for i, m in enumerate(TOKENS):
        x = torch.randn(m, 64).bfloat16()
        if unbacked and i == 0:
            torch._dynamo.decorators.mark_unbacked(x, 0)
        normed, logits, chosen = call(x)
        assert logits.shape == (m, 16)
        # 64 products of bfloat16, below 16 and exact in float32, are summed in some order.
        want = F.linear(normed.double(), model.weight.double())
        torch.testing.assert_close(logits.double(), want, rtol=0, atol=64 * 64 * 16 * 2.0**-24)
        # Of the same logits: exp, and a sum of 16.
        want = logits.softmax(-1).topk(4)[0]
        torch.testing.assert_close(chosen, want, rtol=2.0**-20, atol=0)


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def ops_of(model: Router) -> set[tuple[str, tuple[int, int | None]]]:
    """The router's ops, each with its range of M."""
    sites = [s for row in compile_ext.explain(model).rows if (s := row.site) is not None]
    return {(s.op, s.m) for s in sites if "router" in s.op}


@torch.no_grad()
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("unbacked", [False, True], ids=["dynamic", "unbacked"])
def test_graphs_over_all_m(inner: str, unbacked: bool) -> None:
    model = Router()
    options: dict[str, Any] = {"compile_ext.inner": inner}
    dynamic = None if unbacked else True
    call = torch.compile(
        model, backend="compile_ext", fullgraph=True, dynamic=dynamic, options=options
    )
    call_with_each_m(model, call, unbacked=unbacked)
    if unbacked:
        assert graphs() == 1
        assert ops_of(model) == {("compile_ext::router_gemm", (0, None))}
    else:
        assert graphs() == 2
        assert ops_of(model) == {
            ("compile_ext::router_gemm", (2, None)),
            ("compile_ext::router_gemm_m1", (1, 1)),
        }


@torch.no_grad()
def test_the_one_op_branches_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, and a kernel that takes up to four tokens: it gets those and no others."""
    taken: list[int] = []

    def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        taken.append(a.shape[0])
        return router_gemm_ref(a, b, bias)

    def why_not(a: Tensor, b: Tensor, bias: Tensor | None) -> str | None:
        return None if checks.at_most(a.shape[0], 4) else "takes up to 4 tokens"

    few = next(k for k in KERNELS if k.name == "aten")
    monkeypatch.setattr(few, "why_not", why_not)
    monkeypatch.setattr(few, "run", run)
    model = Router()
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    call = torch.compile(model, backend="compile_ext", fullgraph=True, options=options)
    call_with_each_m(model, call, unbacked=True)
    assert taken == [1, 2, 3, 4]
    assert graphs() == 1
