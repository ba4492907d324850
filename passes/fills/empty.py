"""Uninitialised tensors, of static and of symbolic size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.derivation import Uninitialised
from compile_ext.passes.readers import is_empty
from compile_ext.passes.values import fake, is_static, same_size, tensor

_SIZE_OF = torch.ops.aten.sym_size.int


def like(value: Node, ctx: PassContext) -> Uninitialised | None:
    """What has the form of ``value`` and no contents; None where its size is symbolic."""
    found: Any = tensor(value)
    form = (*found.shape, *found.stride())
    if not all(map(is_static, form)):
        return None
    shape, stride = (tuple(map(int, x)) for x in (found.shape, found.stride()))
    return Uninitialised(shape, stride, found.dtype, found.device, ctx.poison)


def why_no_empty(value: Node, before: Node) -> str | None:
    """Why the graph cannot allocate the like of ``value`` in front of ``before``, or None."""
    found: Any = tensor(value)
    strides = () if _is_row_major(found) else found.stride()
    for size in (*found.shape, *strides):
        if not is_static(size) and _spelling(size, before, value) is None:
            return f"its size {size} is known behind it only"
    return None


def insert_empty(value: Node, before: Node, ctx: PassContext) -> Node:
    """An allocation in front of ``before`` with the form of ``value``; ``why_no_empty`` must be
    None."""
    made: Any = tensor(value)
    form = {"dtype": made.dtype, "device": made.device}
    shape = _sizes(made.shape, before, value, ctx)
    if _is_row_major(made):  # no strides: nothing may hold the product of two symbolic sizes
        empty = ctx.insert(before, torch.empty, shape, **form)
    else:
        stride = _sizes(made.stride(), before, value, ctx)
        empty = ctx.insert(before, torch.empty_strided, shape, stride, **form)
    if not ctx.poison:
        return empty
    if ctx.why_no_input(before.graph):
        return ctx.insert(before, "fill_", empty, _poison_of(made.dtype))
    # Not a number: Inductor would write it as an FP8 constant, which Triton has not got.
    one = Uninitialised((), (), made.dtype, made.device, poison=True)
    return ctx.insert(before, "copy_", empty, ctx.derive(before.graph, (), one))


def holds_nothing(node: Node) -> bool:
    """What ``insert_empty`` made, poison or not: its values mean nothing."""
    if node.op == "call_method" and node.target in ("copy_", "fill_"):
        node = node.args[0]  # type: ignore[assignment]
    return is_empty(node)


def _is_row_major(x: Tensor) -> bool:
    """Whether its strides are those of ``torch.empty``, also where a dimension has one element."""
    step: int | torch.SymInt = 1
    for size, stride in reversed([*zip(x.shape, x.stride(), strict=True)]):
        if not same_size(stride, step):
            return False
        # As torch does: an empty dimension counts as one of one element.
        step = step * (max(size, 1) if is_static(size) else size)
    return True


def _poison_of(dtype: torch.dtype) -> float:
    """A number that whoever reads it shows: NaN, or -1 (every bit) where there is none."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else -1


def _sizes(sizes: Sequence[Any], before: Node, value: Node, ctx: PassContext) -> tuple[Any, ...]:
    return tuple(int(s) if is_static(s) else _insert_size(s, before, value, ctx) for s in sizes)


def _insert_size(size: torch.SymInt, before: Node, value: Node, ctx: PassContext) -> Node:
    found = _spelling(size, before, value)
    assert found is not None
    node, dim = found
    return node if dim is None else ctx.insert(before, _SIZE_OF, node, dim)


def _spelling(size: torch.SymInt, before: Node, value: Node) -> tuple[Node, int | None] | None:
    """A node that holds this size, or a tensor and its dimension that has it; ``value`` itself goes
    away."""
    tensors: tuple[Node, int] | None = None
    for node in _earlier(before.graph, before):
        found = fake(node)
        if isinstance(found, torch.SymInt) and same_size(found, size):
            if value not in node.all_input_nodes:
                return node, None
        elif isinstance(found, Tensor) and node is not value and tensors is None:
            at = next((d for d, s in enumerate(found.shape) if same_size(s, size)), None)
            # What shares the value's form may be made from it: an input never is.
            if at is not None and node.op == "placeholder":
                tensors = node, at
    return tensors


def _earlier(graph: Graph, before: Node) -> list[Node]:
    found: list[Node] = []
    for node in graph.nodes:
        if node is before:
            break
        found.append(node)
    return found
