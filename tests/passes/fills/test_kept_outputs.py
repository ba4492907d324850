"""Buffers that an op overwrites, and that are filled all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compile_ext

PASS = "strip_placeholder_fills"
GONE = (True, "out is overwritten in full: what filled it is gone")
USED = (False, "out is used before the op overwrites it")
PART = (False, "out is a part of its buffer, and the rest is not overwritten")
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills


def read_first(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(5, 8)
    total = out.view(-1).sum()
    ops.copy_out(x, out)
    return out, total


def fill_is_kept(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(5, 8)
    kept = out.clone()
    ops.copy_out(x, out)
    return out, kept


def accumulated(x: Tensor) -> Tensor:
    out = torch.zeros(5, 8)
    out += x
    ops.copy_out(x, out)
    return out


def copied_from_itself(x: Tensor) -> Tensor:
    out = torch.ones(5, 8)
    out[0] = out[1]
    ops.copy_out(x, out)
    return out


def a_part(x: Tensor) -> Tensor:
    out = torch.zeros(6, 8)
    ops.copy_out(x, out[:5])
    return out


def every_other_column(x: Tensor) -> Tensor:
    out = torch.zeros(5, 16)
    ops.copy_out(x, out[:, ::2])
    return out


def also_read(x: Tensor) -> Tensor:
    out = torch.ones(5, 8)
    ops.copy_out(out, out)
    return out


def also_read_in_a_list(x: Tensor) -> Tensor:
    out = torch.ones(5, 8)
    fills.sums([x, out], out)
    return out


def effect(x: Tensor) -> Tensor:
    out = fills.effect(x)
    ops.copy_out(x, out)
    return out


LEFT = {
    read_first: USED,
    fill_is_kept: USED,
    accumulated: USED,
    copied_from_itself: USED,
    a_part: PART,
    every_other_column: PART,
    also_read: (False, "the op is given the buffer as x too"),
    also_read_in_a_list: (False, "the op is given the buffer as xs too"),
    effect: (False, "out comes from compile_ext_fills::effect, which may do more than make it"),
}


@pytest.mark.parametrize(("model", "decision"), LEFT.items(), ids=[f.__name__ for f in LEFT])
def test_left_alone(rewrite: Any, op_calls: list[str], model: Any, decision: Any) -> None:
    got = rewrite(model, torch.randn(5, 8))
    assert got.of(PASS) == [decision]
    assert "empty" not in got.graph


def test_effect_runs_on_each_call(rewrite: Any, op_calls: list[str]) -> None:
    rewrite(effect, torch.randn(5, 8))
    assert op_calls == ["effect"] * 2  # eager, compiled


def test_random_numbers_are_drawn() -> None:
    """Nobody reads them, but what is drawn next depends on them."""

    def model(x: Tensor) -> Tensor:
        out = torch.rand(5, 8)
        ops.copy_out(x, out)
        return out

    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    states = []
    for call in (model, compiled):
        torch.manual_seed(1)
        call(torch.ones(5, 8))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    [row] = compile_ext.explain(compiled).rows
    assert "out comes from rand, which may do more than make it" in [
        d.detail for d in row.decisions
    ]


def test_not_an_input(rewrite: Any) -> None:
    """What the caller hands in is written as before; it has no fill."""

    def given(x: Tensor, out: Tensor) -> Tensor:
        ops.copy_out(x, out)
        return out + 1

    assert rewrite(given, torch.randn(5, 8), torch.zeros(5, 8)).of(PASS) == []


def test_not_an_input_that_is_filled(rewrite: Any) -> None:
    def given(x: Tensor, out: Tensor) -> Tensor:
        out.zero_()
        ops.copy_out(x, out)
        return out + 1

    got = rewrite(given, torch.randn(5, 8), torch.ones(5, 8))
    assert got.of(PASS) == []
    assert ".zero_(" in got.graph
