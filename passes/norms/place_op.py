"""Put an op in the place of a norm and what belongs to it, or leave the graph as it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.expressions.expression import Expr
from compile_ext.passes.fit_result import fit_result
from compile_ext.passes.norms.region import Region, Writers
from compile_ext.passes.norms.residual import addends_of
from compile_ext.passes.op_calls import overload
from compile_ext.passes.values import storage, tensor


@dataclass(frozen=True)
class NormOp:
    """An op that begins with an RMSNorm: ``(x, weight, eps, round_before_weight)``.

    Args:
        op: what it is.
        adding: its form that makes the residual's sum first: ``(x, residual, weight, ...)``.
        results: which of its results is which; ``adding`` has the sum behind them.
    """

    op: OpOverload
    adding: OpOverload
    results: Mapping[Expr, int]


def place_norm(
    region: Region, ops: NormOp, writers: Writers, replaced: dict[Node, Node], ctx: PassContext
) -> Node | str:
    """The call that comes in the place of a region, with the sum before it where that can be, or
    the reason why not.

    Args:
        replaced: what came in the place of nodes since the region was found: a norm of a sum, or of
            a norm, for which a call was placed, reads what that call gives.
    """
    region.follow(replaced)
    x = region.nodes_of["x"]
    reason = why_not_placed(region, writers, ctx)
    if reason is not None:
        return reason
    results = {node: ops.results[region.results[node]] for node in region.ends()}
    addends = addends_of(region, writers, ctx)
    if addends is not None:
        make = partial(_call, region, ops.adding, addends, ctx)
        placed = place_op(region, make, x, {**results, x: len(ops.results)}, addends[0], ctx)
        if not isinstance(placed, str):
            replaced.update(placed.results)
            return placed.call
    before = min(n for n in region.computed() if n in region.results)
    placed = place_op(region, partial(_call, region, ops.op, (x,), ctx), before, results, x, ctx)
    if isinstance(placed, str):
        return placed
    replaced.update(placed.results)
    return placed.call


def why_not_placed(region: Region, writers: Writers, ctx: PassContext) -> str | None:
    nodes = region.computed()
    return (
        next((reason for x in nodes if (reason := ctx.stand_back(x))), None)
        or region.why_not_alone()
        or region.why_not_unwritten(writers)
    )


@dataclass(frozen=True)
class Placed:
    """A call, and what came in the place of each node that others read."""

    call: Node
    results: Mapping[Node, Node]


def place_op(
    region: Region,
    make: Callable[[Node], Node],
    before: Node,
    results: Mapping[Node, int],
    lender: Node,
    ctx: PassContext,
) -> Placed | str:
    """What was placed, or the reason why nothing was.

    Args:
        make: inserts the call before a node, and gives it.
        before: that node, before which all that the call reads is computed.
        results: the nodes that others read, and which of the call's results is which.
        lender: a tensor of the same sizes as the results, to take symbolic ones from.
    """
    mark = before.prev
    call = make(before)
    placed = _placed(call, results, lender, before, ctx)
    if isinstance(placed, str):
        while before.prev is not mark:
            before.graph.erase_node(before.prev)
        return placed
    for number in region.numbers:
        number.guard()
    inputs = region.nodes_of.values()
    left = [*region.nodes(), *region.reads, *(y for x in inputs for y in x.all_input_nodes)]
    ctx.report.moved(region.starts[0], call)
    for old, new in placed.items():
        ctx.replace(old, new)
    ctx.erase_dead(reversed(left))
    return Placed(call, placed)


def _call(
    region: Region, op: OpOverload, rows: tuple[Node, ...], ctx: PassContext, before: Node
) -> Node:
    norm = region.norm
    tensors = [reshaped(x, before, ctx, -1, norm.k) for x in rows]
    return ctx.insert(
        before, op, *tensors, *norm_arguments(region, before, ctx), like=region.starts[0]
    )


def norm_arguments(region: Region, before: Node, ctx: PassContext) -> tuple[Any, ...]:
    """``weight, eps, round_before_weight`` of an op."""
    norm, weight = region.norm, region.weight
    flat = None if weight is None else reshaped(weight, before, ctx, norm.k)
    return flat, norm.eps, norm.round_before_weight


def reshaped(x: Node, before: Node, ctx: PassContext, *shape: int) -> Node:
    found = tensor(x)
    assert found is not None
    return x if found.dim() == len(shape) else ctx.insert(before, "reshape", x, *shape, like=x)


def _placed(
    call: Node, results: Mapping[Node, int], lender: Node, before: Node, ctx: PassContext
) -> dict[Node, Node] | str:
    parts: dict[int, Node] = {}
    leaving: dict[int, int | None] = {}
    placed: dict[Node, Node] = {}
    for old, number in results.items():
        if number not in parts:
            parts[number] = _part(call, number, before, old, ctx)
        if ctx.is_leaving(old) and leaving.setdefault(number, storage(old)) != storage(old):
            return "the graph hands out two tensors that would be one"  # the caller may write one
        new = fit_result(parts[number], old, lender, before, ctx)
        if isinstance(new, str):
            return new
        placed[old] = new
    return placed


def _part(call: Node, number: int, before: Node, like: Node, ctx: PassContext) -> Node:
    op = overload(call)
    assert op is not None
    if len(op._schema.returns) == 1:
        return call
    return ctx.insert(before, operator.getitem, call, number, like=like)
