"""The constants of one set of parameters in one compiled graph, and the check on each call that
they are fresh.

The check is all that a derived constant costs once it is made: an address and, where the constant
is a copy, a version counter for each source. It is written out as one expression, because a loop
over stamps takes as long again as the readings themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_ext.derived import Constants, Stamp, expired

# Dynamo guards the strides of parameters from some version on: not in 2.11, but in 2.13.
_MUST_CHECK_STRIDES = torch.__version__ < "2.13"

# Of a derived input: the positions of its sources among the arguments, and the constants of its
# derivation.
Table = tuple[tuple[int, ...], Constants]
Check = Callable[[Sequence[Any]], bool]


class Binding:
    """What one compiled graph hands in for one set of weights.

    Args:
        weights: the tensors, weakly held, that this binding is for.
        tables: one for each derived input.
        args: the arguments of the call that it is made in.
    """

    __slots__ = ("_state", "_tables", "constants", "forms", "weights")

    def __init__(
        self,
        weights: tuple[weakref.ref[Tensor], ...],
        tables: Sequence[Table],
        args: Sequence[Any],
    ) -> None:
        self.weights = weights
        self._tables = tables
        self._bind(args)

    def values(self, args: Sequence[Any]) -> list[Any]:
        """The tensors for the extra inputs of the graph; ``args`` hold the weights of this
        binding."""
        seen, is_fresh, values = self._state
        return values if seen is expired[0] and is_fresh(args) else self._bind(args)

    def _bind(self, args: Sequence[Any]) -> list[Any]:
        seen = expired[0]
        made = [(at, table.of([args[i] for i in at])) for at, table in self._tables]
        values = [constant.value for _, constant in made]
        is_fresh: Check = _never
        stamps = [constant.stamps for _, constant in made]
        if None not in stamps:
            pairs = zip((at for at, _ in made), stamps, strict=True)
            is_fresh = _check([x for at, s in pairs if s for x in zip(at, s, strict=True)])
        # What explain shows: each constant, and for which form of the weights.
        self.constants = made
        self.forms = [form(x) for r in self.weights if (x := r()) is not None]
        # One assignment: another thread must not meet a check beside the values of another.
        self._state = seen, is_fresh, values
        return values


def _check(stamps: Sequence[tuple[int, Stamp]]) -> Check:
    """``args -> bool``: whether the sources at these positions are as the stamps say."""
    tests = dict.fromkeys(t for i, stamp in stamps for t in _tests(f"args[{i}]", stamp))
    check: Check = eval(f"lambda args: {' and '.join(tests) or True}", {})
    return check


def _tests(x: str, stamp: Stamp) -> list[str]:
    tests = [f"{x}.data_ptr() == {stamp.pointer}"]
    if stamp.version is not None:
        tests.append(f"{x}._version == {stamp.version}")
    if _MUST_CHECK_STRIDES:
        tests.append(f"{x}.stride() == {stamp.strides}")
    return tests


def _never(args: Sequence[Any]) -> bool:
    """Of sources that cannot be watched."""
    return False


def form(x: Tensor) -> tuple[Any, ...]:
    """What a graph is compiled for, of one tensor."""
    return x.dtype, x.shape, x.stride()
