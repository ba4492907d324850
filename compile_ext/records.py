"""What is known of the graphs that are compiled and alive, for ``explain`` and ``sites``.

A record lives as long as the compiled function that Dynamo holds, and keeps no parameter alive. It
learns which parameters its graph serves as they come by: one graph may serve many layers.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from compile_ext.bindings import Binding, Table, form
from compile_ext.ops.device import Target
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
        weights: positions, among the graph's inputs, of the tensors that name its sites or that its
            constants come from.
        call_inputs: those of ``weights`` that the caller hands in: no parameter or buffer.
        constants: one table for each derived input.
        backend_seconds: wall time of our passes and of the inner compiler.
        compile_id: Dynamo's name for the compilation, ``frame/attempt``.
        target: the GPU that tensors of the device ``meta`` stood for, if any.
        bindings: for the identities of each set of weights that came by, what they need. It goes
            with the first of them that dies.
        parameters: those of ``weights`` that the caller does not hand in and that came by, by
            position and identity: they tell whose graph it is when what he hands in has died.
    """

    report: GraphReport
    place: Place | None
    weights: tuple[int, ...]
    call_inputs: frozenset[int] = frozenset()
    constants: tuple[Table, ...] = ()
    backend_seconds: float = 0.0
    compile_id: str = ""
    target: Target | None = None
    bindings: dict[tuple[int, ...], Binding] = field(default_factory=dict)
    parameters: dict[tuple[int, int], weakref.ref[Tensor]] = field(default_factory=dict)

    def bind(self, weights: Sequence[Any], args: Sequence[Any]) -> Binding:
        """Note the weights of a call, those at ``weights``, and make their constants."""
        key, me = tuple(map(id, weights)), weakref.ref(self)

        def forget(_: object) -> None:
            if (record := me()) is not None:  # which dies with its graph
                record.bindings.pop(key, None)

        for position, t in zip(self.weights, weights, strict=True):
            if position not in self.call_inputs:
                self._note_parameter((position, id(t)), t)
        refs = tuple(weakref.ref(t, forget) for t in weights)
        self.bindings[key] = binding = Binding(refs, self.constants, args)
        return binding

    def _note_parameter(self, key: tuple[int, int], t: Tensor) -> None:
        seen = self.parameters
        seen[key] = weakref.ref(t, lambda _: seen.pop(key, None))

    def served(self) -> list[tuple[dict[int, Tensor], Binding]]:
        """For each set of weights seen and still alive: position -> tensor, and its constants."""
        found: list[tuple[dict[int, Tensor], Binding]] = []
        for binding in list(self.bindings.values()):
            tensors = [x for r in binding.weights if (x := r()) is not None]
            # A graph that was compiled for other strides serves them no more.
            if [form(x) for x in tensors] == binding.forms:
                found.append((dict(zip(self.weights, tensors, strict=True)), binding))
        return found

    def kept(self) -> list[tuple[int, Tensor]]:
        """The parameters that came by and are alive, each with its position."""
        found = [(position, r()) for (position, _), r in self.parameters.items()]
        return [(position, t) for position, t in found if t is not None]


# When Dynamo was last reset, in microseconds since the epoch: what it did before concerns no live
# graph.
reset_time_us = 0


def note_reset() -> None:
    """Dynamo has dropped every graph: the records, which garbage may keep for long, go at once."""
    global reset_time_us
    reset_time_us = time.time_ns() // 1000
    _HIDDEN.clear()
    _LIVE.clear()


def keep(record: GraphRecord, owner: Any) -> None:
    """Let the record of a graph without weights live as long as what runs the graph: of a wrapper
    that keeps Dynamo out, Dynamo holds what is inside."""
    from torch._dynamo.eval_frame import innermost_fn

    owner = innermost_fn(owner)
    _KEPT[getattr(owner, "__self__", owner)] = record


_KEPT: weakref.WeakKeyDictionary[Any, GraphRecord] = weakref.WeakKeyDictionary()
_HIDDEN: weakref.WeakSet[GraphRecord] = weakref.WeakSet()
_LIVE: weakref.WeakSet[GraphRecord] = weakref.WeakSet()


def add(record: GraphRecord) -> None:
    (_HIDDEN if _hiding.get() else _LIVE).add(record)


@contextmanager
def hiding() -> Iterator[None]:
    """Do not show what is compiled inside, by this thread: it is compiled only to look."""
    token = _hiding.set(True)
    try:
        yield
    finally:
        _hiding.reset(token)


_hiding: ContextVar[bool] = ContextVar("compile_ext_hiding", default=False)


def hidden() -> list[GraphRecord]:
    """The graphs that were compiled only to look, as long as Dynamo holds them."""
    return list(_HIDDEN)


def live() -> list[GraphRecord]:
    """The records of all compiled graphs that Dynamo still holds, in no order."""
    return list(_LIVE)
