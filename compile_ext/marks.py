"""``mark_router``: the user says which module is a router, where its readers do not show it.

The mark lies on the module, whose weight is looked up each time a graph is compiled: a parameter
carries no attribute through ``copy.deepcopy`` or ``load_state_dict(assign=True)``, and a graph has
no modules, only their paths.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from compile_ext.ops.errors import MarkError
from compile_ext.passes import Decision
from compile_ext.passes.lower_router_linear import lower_router_linear
from compile_ext.report import Row
from compile_ext.tensors import original

_ATTRIBUTE = "_compile_ext_router"
_PASS = lower_router_linear.__name__
Module = TypeVar("Module", bound=nn.Module)


class _Mark:
    """Lives in its module's ``__dict__``, and is copied and pickled with it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        _MARKS.add(self)

    def __reduce__(self) -> tuple[Callable[[nn.Module], _Mark], tuple[nn.Module | None]]:
        # deepcopy and pickle hand in the copy of the module, which they know by now.
        return _Mark, (self.module(),)


_MARKS: weakref.WeakSet[_Mark] = weakref.WeakSet()


def mark_router(module: Module) -> Module:
    """Say that a module is the router of a mixture of experts: its linear becomes ``router_gemm``.

    For routers that ``lower_router_linear`` does not see: what follows is no top-k, argmax or
    float32 softmax, or lies in another graph. All else that the pass asks for still holds; what it
    refuses, or does not find, is in ``explain``.

    The mark goes along with ``copy.deepcopy``, pickle, ``load_state_dict`` (``assign=True`` too),
    ``.to()`` and a new ``weight``. It does not go along with a module that is built anew from a
    state dict, or that another module replaces (some quantizations). Call it before the first call
    of the compiled model, before or after ``torch.compile``: graphs that are compiled stay as they
    are until ``torch.compiler.reset()``. Layers that share a graph share the marks of the first.

    Args:
        module: its attribute ``weight`` is the router's, ``[n, k]`` (``nn.Linear``); or it has one
            matrix, in a module of its own.

    Returns:
        The module.

    Raises:
        MarkError: it is no module, or has no matrix, or several.
    """
    target = original(module)
    if not isinstance(target, nn.Module):
        wanted, fix = "an nn.Module", "mark the module that holds the router's weight"
        raise MarkError("mark_router", f"a {type(target).__name__}", wanted, fix)
    matrices = _matrices_of(target)
    if len(matrices) != 1:
        names = f" ({', '.join(matrices)})" if matrices else ""
        found = f"{type(target).__name__} with {len(matrices)} matrices{names}"
        raise MarkError("mark_router", found, "one: the router's weight", "mark the linear itself")
    setattr(target, _ATTRIBUTE, _Mark(target))
    return module


def positions(inputs: Sequence[Any]) -> frozenset[int]:
    """Which inputs of a graph are weights of marked modules."""
    weights = _weights()
    return frozenset(i for i, x in enumerate(inputs) if id(x) in weights)


def unnamed(rows: Iterable[Row], names: Mapping[int, str], disabled: Collection[str]) -> list[Row]:
    """A row for each marked weight of which no compiled graph says anything.

    Args:
        rows: what the graphs say.
        names: the module path of each tensor of the model, by identity.
        disabled: the passes that were switched off: where it is that of the marks, no rows.
    """
    if _PASS in disabled:
        return []
    said = {row.module for row in rows if any(d.pass_name == _PASS for d in row.decisions)}
    marked = {names[i] for i in _weights() if i in names}
    reason = "it is marked as a router, and no graph that was compiled since reads its weight"
    decisions = (Decision(_PASS, False, reason),)
    return [Row(path, "parameter", None, decisions) for path in sorted(marked - said)]


def _weights() -> set[int]:
    modules = [mark.module() for mark in list(_MARKS)]
    return {id(x) for m in modules if m is not None for x in _matrices_of(m).values()}


def _matrices_of(module: nn.Module) -> dict[str, Tensor]:
    """Its ``weight``, or else all matrices among its parameters and buffers, by name."""
    weight = getattr(module, "weight", None)
    named: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    if isinstance(weight, Tensor):
        named = [("weight", weight)]
    return {name: x for name, x in named if is_lazy(x) or x.dim() == 2}
