"""A scaled_mm with kernels of the tests' own, and a clock that has fixed times for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import define
from compile_ext.ops.scaled_mm import OP, scaled_mm_ref
from compile_ext.tune import operands
from compile_ext.tune.timing import Call


@dataclass
class FixedClock:
    """``us(kernel name, m)`` for all layers together; runs what it times once."""

    us: Callable[[str, int], float]
    m: int = 0
    ran: list[tuple[str, int]] = field(default_factory=list)

    def prepare(self, call: Call) -> Call:
        call()
        return call

    def times(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        for name in calls:
            self.ran.append((name, self.m))
        return {name: [self.us(name, self.m)] * 5 for name in calls}


@pytest.fixture
def clock() -> FixedClock:
    """``quick`` takes 10 us below 16 tokens and 30 from there, ``steady`` 20."""

    def us(name: str, m: int) -> float:
        return {"quick": 10.0 if m < 16 else 30.0, "steady": 20.0}[name]

    return FixedClock(us)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, clock: FixedClock) -> define.OpDefinition:
    """In order: a kernel of another device, two that are right, and four that are not."""

    def right(a: Tensor, *rest: Any) -> Tensor:
        clock.m = a.shape[0]
        return scaled_mm_ref(a, *rest)

    def wrong(*args: Any) -> Tensor:
        return scaled_mm_ref(*args) * 1.02

    def nan(*args: Any) -> Tensor:
        return scaled_mm_ref(*args) * float("nan")

    def raises(*args: Any) -> Tensor:
        raise RuntimeError("out of shared memory\nand a trace")

    def slow_to_fail(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        if b is not first_b[0]:  # after it was right for the first layer
            raise RuntimeError("a second layer")
        return scaled_mm_ref(a, b, *rest)

    first_b: list[Tensor] = []
    make = operands.Fp8.calls

    def calls(self: Any, *args: Any) -> Any:
        made = make(self, *args)
        first_b[:] = [made[0][1]]
        return made

    monkeypatch.setattr(operands.Fp8, "calls", calls)
    monkeypatch.setattr(operands, "LAYERS", 2)
    made = define.OpDefinition(
        OP,
        (
            define.Kernel("elsewhere", lambda *_: "runs on CUDA", torch.clone),
            define.Kernel("steady", define.never, right),
            define.Kernel("quick", define.never, right),
            define.Kernel("wrong", define.never, wrong),
            define.Kernel("nan", define.never, nan),
            define.Kernel("raises", define.never, raises),
            define.Kernel("late", define.never, slow_to_fail),
            define.Kernel("reference", define.never, scaled_mm_ref),
            define.Kernel("named only", define.never, raises),
        ),
    )
    monkeypatch.setitem(define._DEFINITIONS, OP, made)
    return made
