"""Measure: which kernels are timed, which are at fault, and what the operands are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_ext.ops import define
from compile_ext.tune import measure as measure_module
from compile_ext.tune.choose import Timing
from compile_ext.tune.measure import measure
from compile_ext.tune.operands import OPERANDS, Weights


def test_only_kernels_that_are_right_are_timed(kernels: define.OpDefinition, clock: Any) -> None:
    operands = OPERANDS["scaled_mm"]
    found = measure(kernels, operands, operands.weights(32, 64, "cpu"), 5, clock)
    assert (found.op, found.n, found.k, found.m) == ("scaled_mm", 32, 64, 5)
    assert list(found.timings) == ["steady", "quick"]  # in the order of the tuple
    assert found.timings["quick"] == Timing(5.0, 5.0, 5.0)  # of one of two layers
    assert "elsewhere" not in found.timings
    assert found.faults == {
        "wrong": "wrong: relative error 0.02",
        "nan": "wrong: relative error nan",
        "raises": "RuntimeError: out of shared memory",
        "late": "RuntimeError: a second layer",
    }


def test_where_no_kernel_is_right_nothing_is_timed(kernels: Any, clock: Any) -> None:
    operands = OPERANDS["scaled_mm"]
    names = [k for k in kernels.kernels if k.name not in ("steady", "quick")]
    definition = define.OpDefinition(kernels.overload, tuple(names))
    found = measure(definition, operands, operands.weights(32, 64, "cpu"), 5, clock)
    assert found.timings == {}
    assert clock.ran == []


@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 128), (5, 40, 200)])
def test_operands(op: str, m: int, n: int, k: int) -> None:
    """The op takes them, and gives numbers near 1."""
    weights = OPERANDS[op].weights(n, k, "cpu")
    assert isinstance(weights, Weights)
    calls = OPERANDS[op].calls(weights, m, torch.float32)
    assert len(calls) == len({x[1].data_ptr() for x in calls}) == 40
    for args in calls[:2]:
        out = getattr(torch.ops.compile_ext, op)(*args)
        assert out.shape == (m, n)
        # Of K products of two normal numbers, scaled by 0.5 to 1.5 over sqrt(K).
        assert 0.4 < float(out.std()) < 2.0


@pytest.mark.parametrize(("us", "rounds"), [(100.0, 40), (40_000.0, 20), (1e6, 5)])
def test_slow_replays_get_fewer_rounds(
    us: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest counts; one round before shows which that is."""
    asked: list[int] = []

    def in_turn(calls: Any, count: int, *, events: bool, before: Any) -> dict[str, list[float]]:
        asked.append(count)
        assert events
        before()
        return {"quick": [1.0] * count, "slow": [us] * count}

    monkeypatch.setattr(measure_module, "in_turn", in_turn)
    clock = object.__new__(measure_module.GraphClock)
    clock._flush = torch.ones(1)  # 512 MB on a GPU
    assert len(clock.times({})["slow"]) == rounds
    assert asked == [1, rounds]
