"""What is known of the graphs that are compiled and alive, for ``explain`` and ``sites``.

A record lives as long as the compiled function that Dynamo holds, and keeps no parameter alive. It
learns which parameters its graph serves as they come by: one graph may serve many layers.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from compile_ext.passes import GraphReport


@dataclass(frozen=True)
class Place:
    """The line of Python on which a graph ended, and the graph break that ended it, if one did."""

    file: str
    line: int
    function: str
    graph_break: str | None


@dataclass(eq=False)
class GraphRecord:
    """One compiled graph.

    Args:
        report: what the passes said.
        place: where in the user's program it comes from.
        weights: positions, among the graph's inputs, of the tensors that name its sites.
        backend_seconds: wall time of our passes and of the inner compiler.
        compile_id: Dynamo's name for the compilation, ``frame/attempt``.
    """

    report: GraphReport
    place: Place | None
    weights: tuple[int, ...]
    backend_seconds: float = 0.0
    compile_id: str = ""
    bindings: dict[tuple[int, ...], tuple[weakref.ref[Tensor], ...]] = field(default_factory=dict)

    def bind(self, tensors: Sequence[Any]) -> None:
        """Note the tensors that a call hands in at ``weights``."""
        key, bindings = tuple(map(id, tensors)), self.bindings

        # Holds the dict and not the record, which dies with its graph.
        def forget(_: object) -> None:
            bindings.pop(key, None)

        bindings[key] = tuple(weakref.ref(t, forget) for t in tensors)

    def served(self) -> list[dict[int, Tensor]]:
        """For each set of parameters seen: position -> tensor, those still alive."""
        found = []
        for refs in list(self.bindings.values()):
            tensors = [r() for r in refs]
            if all(t is not None for t in tensors):
                found.append(dict(zip(self.weights, tensors, strict=True)))
        return found  # type: ignore[return-value]


# When Dynamo was last reset, in microseconds since the epoch: what it did before concerns no live
# graph.
reset_time_us = 0


def note_reset() -> None:
    global reset_time_us
    reset_time_us = time.time_ns() // 1000


_LIVE: weakref.WeakSet[GraphRecord] = weakref.WeakSet()


def add(record: GraphRecord) -> None:
    _LIVE.add(record)


def live() -> list[GraphRecord]:
    """The records of all compiled graphs that Dynamo still holds, in no order."""
    return list(_LIVE)
