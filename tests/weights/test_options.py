"""Options that decide where constants live and how much memory they may take, and ``explain``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compile_ext

pytestmark = pytest.mark.usefixtures("no_grad")

HOMED = "re-homed: the parameter lives in it"
PREPARE = "a copy: more than rows is added (compile_ext.prepare moves the parameter)"


def test_rehome_false_leaves_every_weight_where_it_is(
    model: Any, x: Tensor, memory: Any, compile_it: Any, assert_same: Any, row_of: Any
) -> None:
    before = [memory(p) for p in model.parameters()]
    compiled = compile_it(model, {"compile_ext.rehome": False})
    assert_same(compiled, model, x)
    compile_ext.refresh(model)
    assert compile_ext.restore(model) == 0
    assert [memory(p) for p in model.parameters()] == before
    assert row_of(model, "0").constants == ("a copy: compile_ext.rehome is False",)
    assert row_of(model, "1").constants == (PREPARE,)


def test_explain_says_how_each_constant_is_kept(
    model: Any, x: Tensor, compile_it: Any, assert_same: Any, row_of: Any
) -> None:
    compiled = compile_it(model)
    assert_same(compiled, model, x)
    assert row_of(model, "0").constants == (HOMED,)
    assert row_of(model, "1").constants == (PREPARE,)
    assert f"weight: {HOMED}" in str(compile_ext.explain(compiled))


FOLDS = {"0": "N 50 -> 64: b, bias, scale_b padded", "1": "K 50 -> 64: a, b padded"}


def too_large(cost: int, left: int, limit: int) -> str:
    left_text = f"it would take {cost} bytes, and {left} of {limit} are left"
    return f"{left_text} (compile_ext.memory_budget)"


# Bytes of layer 0: 64 rows of 64 FP8, of one float32 scale and of one float32 bias; re-homed, the
# 14 new rows of each alone. Of layer 1: 64 rows of 64 FP8.
ALL, NEW, COPY = 64 * (64 + 4 + 4), 14 * (64 + 4 + 4), 64 * 64


@pytest.mark.parametrize(
    ("budget", "rehome", "want"),
    [
        (None, True, FOLDS),
        (None, False, FOLDS),  # padding has no limit of its own
        (NEW + COPY, True, FOLDS),
        (NEW + COPY - 1, True, {**FOLDS, "1": too_large(COPY, COPY - 1, NEW + COPY - 1)}),
        (ALL + COPY, False, FOLDS),
        (COPY, False, {**FOLDS, "0": too_large(ALL, COPY, COPY)}),
        (
            NEW - 1,
            True,
            {"0": too_large(NEW, NEW - 1, NEW - 1), "1": too_large(COPY, NEW - 1, NEW - 1)},
        ),
        (0, False, {"0": too_large(ALL, 0, 0), "1": too_large(COPY, 0, 0)}),
    ],
)
def test_memory_budget(
    budget: int | None,
    rehome: bool,
    want: dict[str, str],
    model: Any,
    x: Tensor,
    compile_it: Any,
    assert_same: Any,
) -> None:
    options = {"compile_ext.rehome": rehome, "compile_ext.memory_budget": budget}
    compiled = compile_it(model, options)
    assert_same(compiled, model, x)
    found = {r.module: r.decisions[0] for r in compile_ext.explain(model).rows}
    assert {name: d.detail for name, d in found.items()} == want
    assert {name: d.fired for name, d in found.items()} == {n: want[n] == FOLDS[n] for n in want}


@pytest.mark.parametrize(("columns", "limit"), [(240, 1024), (239, 1020)])
def test_the_default_budget_is_an_eighth_of_the_weights(
    columns: int, limit: int, compile_it: Any, row_of: Any
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(32, 8).bfloat16())  # 512 bytes, 1024 as float32
            self.rest = nn.Parameter(torch.randn(8, columns))  # 32 bytes a column

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.linear(x, self.w.float()), x @ self.rest

    model = Model()
    compile_it(model)(torch.randn(3, 8))
    (decision,) = row_of(model, "w").decisions
    assert decision.fired == (limit >= 1024)
    assert decision.fired or decision.detail == too_large(1024, limit, limit)


def test_memory_budget_holds_for_weights_that_cannot_move(
    model: Any, x: Tensor, compile_it: Any, row_of: Any
) -> None:
    state = model.state_dict()
    compile_it(model, {"compile_ext.memory_budget": NEW})(x)
    assert state["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert row_of(model, "0").constants == ()  # 4608 bytes of copies against a budget of 1008
