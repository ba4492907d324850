"""Every pass works wherever a call stands: in a body, after a graph break, in a compiled layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compile_ext

ops = torch.ops.compile_ext_tests


class Layer(nn.Module):
    """``body(x, weight, router)`` at a place: the weight [6, 6] needs padding to [8, 8]."""

    def __init__(self, body: Any, place: str) -> None:
        super().__init__()
        self.body, self.place = body, place
        self.w = nn.Parameter(torch.randn(6, 6), requires_grad=False)
        self.r = nn.Parameter(torch.randn(4, 6).bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        if self.place == "checkpoint":
            return checkpoint(self.body, x, self.w, self.r, use_reentrant=False)
        if self.place == "cond":
            branches = (
                lambda x: self.body(x, self.w, self.r),
                lambda x: self.body(x, self.w, self.r),
            )
            return torch.cond(x.sum() > -1e9, *branches, (x,))
        if self.place == "after a graph break":
            torch._dynamo.graph_break()
        return self.body(x, self.w, self.r)


BODIES = {
    "fold_weight_padding": lambda x, w, r: ops.gemm(x, w, None, None, False),
    "strip_placeholder_fills": lambda x, w, r: ops.gemm(x, w, x.new_ones(1), None, False),
    "lower_router_linear": lambda x, w, r: F.linear(x.bfloat16(), r).float().softmax(-1),
    "specialize_m1": lambda x, w, r: ops.gemm(x, w, None, None, False),
}
PLACES = ("checkpoint", "cond", "after a graph break", "layer.compile")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pass_name", BODIES)
def test_fires_for_every_layer(pass_name: str, place: str) -> None:
    model = nn.ModuleList(Layer(BODIES[pass_name], place) for _ in range(3))
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    x = torch.randn(1, 6)
    with torch.no_grad():
        wants = [layer(x) for layer in model]
        for layer in model:
            layer.compile(backend="compile_ext", options=options)
        gots = [layer(x) for layer in model]
    for got, want in zip(gots, wants, strict=True):
        # A sum of 6 products in another order, or router logits (below 16) not rounded to bfloat16.
        atol = 16 * 2.0**-9 if pass_name == "lower_router_linear" else 1e-5
        torch.testing.assert_close(got, want, rtol=0, atol=atol)
    rows = compile_ext.explain(model).rows
    fired = {
        row.module for row in rows for d in row.decisions if d.fired and d.pass_name == pass_name
    }
    weight = "r" if pass_name == "lower_router_linear" else "w"
    assert fired == {f"{i}.{weight}" for i in range(3)}
    sites = {row.module for row in rows if row.site is not None}
    assert fired <= sites  # collect_sites
