"""The compiled graphs of a model: what they will call, and each of them compiled and run, so that
Inductor's own kernels are there and CUDA graphs are captured."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compile_ext import records
from compile_ext.live_graphs import compiled_with
from compile_ext.manifest import Manifest, collect
from compile_ext.ops.device import Target, as_if_on
from compile_ext.ops.errors import in_one_line
from compile_ext.tensors import original

# Of each batch size: with CUDA graphs the first call of a size warms up, the second records, and
# the third is the first that replays.
CALLS = 3
# What torch._dynamo.mark_dynamic and its kin write on a tensor.
_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_unbacked_indices",
    "_dynamo_static_indices",
)

# Batch size -> the arguments of one call of the model: a tuple, or a dict of keywords.
Inputs = Callable[[int], "tuple[Any, ...] | dict[str, Any]"]


@dataclass(frozen=True)
class GraphResult:
    """What became of one batch size.

    Args:
        batch_size: which.
        graphs: how many graphs were compiled for it; 0 where those of another one serve it.
        seconds: wall time of its calls.
        reason: why it failed; "" else.
    """

    batch_size: int
    graphs: int
    seconds: float
    reason: str = ""


def foretell(model: Any, batch_sizes: Sequence[int], inputs: Inputs, target: Target) -> Manifest:
    """What the model will call for these batch sizes, from a copy of it without data: no kernel
    runs, no memory is taken.

    Raises any error of the model's, where it needs data to go on.
    """
    twin: Any = torch.compile(
        _without_data(original(model)), backend="compile_ext", **compiled_with(model)
    )
    found = Manifest()
    with as_if_on(target):
        for size in _largest_first(batch_sizes):
            args, kwargs = tree_map(_to_meta, _arguments(inputs(size)))
            found = found.merge(collect(twin, *args, **kwargs))
    return found


def warm_graphs(model: Any, batch_sizes: Sequence[int], inputs: Inputs) -> tuple[GraphResult, ...]:
    """Call the model for each batch size, the largest first: so the memory of its CUDA graph serves
    the smaller ones. A size that fails is a result, not an error."""
    found = []
    for size in _largest_first(batch_sizes):
        before, start = set(records.live()), time.monotonic()
        reason = ""
        try:
            args, kwargs = _arguments(inputs(size))
            for _ in range(CALLS):
                model(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:  # of the model, or its compilation: of one size alone
            reason = in_one_line(error)
        graphs = len(set(records.live()) - before)
        found.append(GraphResult(size, graphs, time.monotonic() - start, reason))
    return tuple(found)


def _largest_first(batch_sizes: Sequence[int]) -> list[int]:
    return sorted(set(batch_sizes), reverse=True)


def _arguments(given: tuple[Any, ...] | dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(given, tuple | list | dict):  # a tensor would be taken apart, row by row
        raise TypeError(f"inputs(batch_size) returned a {type(given).__name__}: wanted a tuple")
    return ((), given) if isinstance(given, dict) else (tuple(given), {})


def _without_data(model: Any) -> Any:
    """A copy of a module whose tensors are on the device ``meta``. What is no module is taken as it
    is: its tensors are its own affair."""
    if not isinstance(model, nn.Module):
        return model
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(x): _to_meta(x) for x in tensors})


def _to_meta(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, nn.Parameter):
        return nn.Parameter(made, requires_grad=x.requires_grad)
    for name in _MARKS:
        if hasattr(x, name):
            setattr(made, name, getattr(x, name))
    return made
