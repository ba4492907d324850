"""Run every kernel that an op has for a shape: is it right, and how long does it take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from compile_ext.ops.define import Kernel, OpDefinition
from compile_ext.ops.errors import in_one_line
from compile_ext.tune.choose import Timing
from compile_ext.tune.operands import Arguments, Operands, Weights
from compile_ext.tune.timing import Call, captured, in_turn, summary

# Of the norm, in bfloat16 against float32 on the same FP8 operands; one rounding is 2^-9.
RELATIVE_ERROR = 1e-2
_FLUSH_BYTES = 512 * 2**20  # several times the L2 of any GPU so far (H200: 50 MB)
_ROUNDS, _ROUND_US = 40, 20_000.0  # rounds, fewer where one replay takes longer than this


class Clock(Protocol):
    """How calls are timed."""

    def prepare(self, call: Call) -> Call:
        """What is timed in the place of ``call``."""
        ...

    def times(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Microseconds of each call, several times over."""
        ...


class GraphClock:
    """Each call is one CUDA graph; before each replay 512 MB are read, outside of the timed region,
    so that no weight is left in the L2 by luck. Replays of the calls in turn."""

    def __init__(self) -> None:
        self._flush = torch.ones(_FLUSH_BYTES // 4, device="cuda")

    def prepare(self, call: Call) -> Call:
        call()  # whatever compiles does so before the capture
        return captured(call)

    def times(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        [slowest] = map(max, zip(*self._in_turn(calls, 1).values(), strict=True))
        rounds = int(_ROUNDS * min(1.0, _ROUND_US / slowest))
        return self._in_turn(calls, max(5, rounds))

    def _in_turn(self, calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
        return in_turn(calls, rounds, events=True, before=lambda: self._flush.sum())


@dataclass(frozen=True)
class Measurement:
    """One op, shape and M.

    Args:
        timings: of the kernels that run it rightly, in the order of the op's tuple.
        faults: kernels that should run it, and raise or are wrong.
    """

    op: str
    n: int
    k: int
    m: int
    timings: dict[str, Timing]
    faults: dict[str, str]


def candidates(definition: OpDefinition) -> list[Kernel]:
    """The kernels in front of the reference: what stands behind it runs only where it is named."""
    names = [k.name for k in definition.kernels]
    return list(definition.kernels[: names.index("reference")])


def measure(
    definition: OpDefinition, operands: Operands, weights: Weights, m: int, clock: Clock
) -> Measurement:
    """Time the kernels that can run m tokens, after each was compared with the reference."""
    layers = operands.calls(weights, m, torch.bfloat16)
    [reference] = [k for k in definition.kernels if k.name == "reference"]
    want = reference.run(*_in_float32(layers[0]))
    assert isinstance(want, Tensor)
    calls: dict[str, Call] = {}
    faults: dict[str, str] = {}
    for kernel in candidates(definition):
        if kernel.why_not(*layers[0]) is not None:
            continue
        try:
            fault = _fault(kernel, layers[0], want)
            if fault is None:
                calls[kernel.name] = clock.prepare(_all_layers(kernel, layers))
                continue
        # Compilers and libraries raise whatever they like: it is reported, and the others go on.
        except Exception as error:
            fault = in_one_line(error)
        faults[kernel.name] = fault
    times = clock.times(calls) if calls else {}
    timings = {name: _timing(us, len(layers)) for name, us in times.items()}
    return Measurement(definition.name, weights.n, weights.k, m, timings, faults)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Of the norm, in float32."""
    return float((got.float() - want).norm() / want.norm())


def _in_float32(args: Arguments) -> Arguments:
    """The same call with a result that is not rounded to 16 bits."""
    return tuple(torch.float32 if isinstance(x, torch.dtype) else x for x in args)


def _fault(kernel: Kernel, args: Arguments, want: Tensor) -> str | None:
    got = kernel.launch(args, prefetch=True)
    assert isinstance(got, Tensor)
    error = relative_error(got, want)
    # So written that a NaN is wrong.
    return None if error <= RELATIVE_ERROR else f"wrong: relative error {error:.2g}"


def _all_layers(kernel: Kernel, layers: list[Arguments]) -> Call:
    def call() -> Any:
        for args in layers:  # whose weights nobody writes: as all but the first call of a graph
            kernel.launch(args, prefetch=True)

    return call


def _timing(us: list[float], layers: int) -> Timing:
    found = summary([t / layers for t in us])
    return Timing(found["us"], found["quartile_low_us"], found["quartile_high_us"])
