"""``refresh`` of compiled models: what it counts, and what it makes anew or moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compile_ext

pytestmark = pytest.mark.usefixtures("no_grad")

HOMED = "re-homed: the parameter lives in it"
SHARED = "a copy: something else uses its memory"
FOLD_ALL: dict[str, Any] = {"compile_ext.memory_budget": 2**20}


def test_refresh_returns_how_many_constants_there_were(
    model: Any, x: Tensor, new_model: Any, compile_it: Any
) -> None:
    other = new_model()
    assert compile_ext.refresh(model) == 0  # not compiled
    compiled = compile_it(model)
    compiled(x)
    for target in (model, compiled, compiled.forward):
        assert compile_ext.refresh(target) == 4
    assert compile_ext.refresh(model[0]) == 3
    assert compile_ext.refresh(other) == 0


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat([self.q, self.k]))


def test_refresh_of_a_constant_with_two_sources(
    compile_it: Any, assert_same: Any, row_of: Any
) -> None:
    model, x = Fused(), torch.randn(5, 4)
    compiled = compile_it(model, FOLD_ALL)
    assert_same(compiled, model, x)
    assert row_of(model, "q").constants == ("a copy: it is computed",)
    for p in model.parameters():
        p.data.mul_(2)
    compile_ext.refresh(model)
    assert_same(compiled, model, x)


def test_refresh_counts_a_constant_with_two_sources_once(compile_it: Any) -> None:
    model = Fused()
    compile_it(model, FOLD_ALL)(torch.randn(5, 4))
    assert compile_ext.refresh(model) == 1


def test_refresh_moves_a_weight_that_nobody_else_uses_any_more(
    model: Any, x: Tensor, compile_it: Any, assert_same: Any, row_of: Any
) -> None:
    state = model.state_dict()
    compiled = compile_it(model)
    assert_same(compiled, model, x)
    assert row_of(model, "0").constants == (SHARED,)
    model[0].weight.copy_(model[0].weight.flip(0))
    assert_same(compiled, model, x)
    del state
    compile_ext.refresh(model)
    assert row_of(model, "0").constants == (HOMED,)
    assert_same(compiled, model, x)
