"""The constants of one set of parameters in one compiled graph, and the check on each call that
they are fresh.

The check is all that a derived constant costs once it is made, so it is written for speed: one
address for each source, and its version counter where the constant is a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compile_ext.derived import Constant, Constants

# Dynamo guards the strides of parameters from some version on: not in 2.11, but in 2.13.
_MUST_CHECK_STRIDES = torch.__version__ < "2.13"

# Of a derived input: the positions of its sources among the arguments, and its table.
Table = tuple[tuple[int, ...], Constants]


class Binding:
    """Args:
    weights: the tensors, weakly held, that this binding is for.
    tables: one for each derived input.
    args: the arguments of the call that it is made in.
    """

    __slots__ = (
        *("_copies", "_homes", "_is_watched", "_sources", "_tables", "_values"),
        *("constants", "weights"),
    )

    def __init__(
        self,
        weights: tuple[weakref.ref[Tensor], ...],
        tables: Sequence[Table],
        args: Sequence[Any],
    ) -> None:
        self.weights = weights
        self._tables = tables
        self.constants: list[tuple[tuple[int, ...], Constant]] = []
        self._refresh(args)

    def values(self, args: Sequence[Any]) -> list[Any]:
        """The tensors for the extra inputs of the graph; ``args`` hold the weights of this
        binding."""
        if not self._is_watched:
            return self._refresh(args)
        for i, stamp in self._copies:
            x = args[i]
            if x._version != stamp.version or x.data_ptr() != stamp.pointer:
                return self._refresh(args)
        for i, stamp in self._homes:
            if args[i].data_ptr() != stamp.pointer:
                return self._refresh(args)
        if _MUST_CHECK_STRIDES:
            for i, stamp in self._sources:
                if args[i].stride() != stamp.strides:
                    return self._refresh(args)
        return self._values

    def _refresh(self, args: Sequence[Any]) -> list[Any]:
        made = [(at, table.of([args[i] for i in at])) for at, table in self._tables]
        self.constants = made
        self._values = [constant.value for _, constant in made]
        self._is_watched = all(constant.stamps for _, constant in made)
        self._sources = [(i, s) for at, c in made for i, s in zip(at, c.stamps, strict=False)]
        # Another thread may look meanwhile: it finds stamps that fit only with their values.
        self._homes = [(i, s) for i, s in self._sources if s.version is None]
        self._copies = [(i, s) for i, s in self._sources if s.version is not None]
        return self._values
