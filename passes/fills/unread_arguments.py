"""Take away what an op is handed and does not read.

    before: s = x.new_ones(1); y = op(x, w, s)           after: y = op(x, w, None)     Tensor? s
                                                                y = op(x, w, s')         Tensor s

s' is an extra input, one uninitialised buffer for all sites of its form; where the size is symbolic
it is ``empty``. What computed the argument goes too, unless others read it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from compile_ext.ops.contract import is_optional, is_unread
from compile_ext.passes.context import PassContext
from compile_ext.passes.fills import empty
from compile_ext.passes.op_calls import OpCall
from compile_ext.passes.readers import is_empty, is_fill
from compile_ext.passes.values import fakes, has_free_size, requires_grad, storage, tensor


def strip_argument(call: OpCall, name: str, ctx: PassContext) -> Node | None:
    """Replace one argument that the contract names; the node that it was, if it was replaced."""
    value = call.arguments[name]
    if not isinstance(value, Node):
        return None  # None: nothing is handed over
    if not is_unread(call.op, call.contract, name, fakes(call.arguments)):
        ctx.skipped(call.node, f"{name} is read")
        return None
    found = ctx.stand_back(call.node) or _replacement(call, name, value, ctx)
    if isinstance(found, str):
        ctx.skipped(call.node, found)
        return None
    make, became = found
    ctx.rewrite(call, {name: make()})
    ctx.fired(call.node, f"{name} is not read: {became}")
    return value


def why_kept(value: Node, ctx: PassContext) -> str | None:
    """Why a fill that an op was handed is still made, or None."""
    if value._erased or not any(is_fill(x) for x in _chain(value)):
        return None
    if ctx.is_leaving(value):
        return "the graph hands it out"
    return "the graph writes it" if ctx.is_written(value) else "others read it"


def _chain(value: Node) -> list[Node]:
    """A node and what it is made from through views, casts and writes, first inputs only."""
    found = [value]
    while found[-1].op in ("call_function", "call_method") and found[-1].all_input_nodes:
        found.append(found[-1].all_input_nodes[0])
    return found


def _replacement(
    call: OpCall, name: str, value: Node, ctx: PassContext
) -> tuple[Callable[[], Node | None], str] | str:
    """How to make what takes an argument's place, and what that is; or why nothing does."""
    if tensor(value) is None:
        return f"{name} is not a tensor"
    if requires_grad(value):
        return f"{name} requires grad"
    if has_free_size(value):
        return f"the size of {name} depends on data"
    if is_optional(call.op, name):
        if not ctx.poison:
            return (lambda: None), "None"
    elif value in ctx.derived or _is_input(value):
        return f"{name} is an input of the graph, which costs nothing"
    what = "poison" if ctx.poison else "uninitialised"
    form = empty.like(value, ctx)
    if form is not None and not (ctx.why_no_input(value.graph) or ctx.charge(((), form))):
        return (lambda: ctx.derive(value.graph, (), form)), f"a shared buffer, {what}"
    if is_empty(value) and not ctx.poison:
        return f"{name} is uninitialised already"
    reason = empty.why_no_empty(value, call.node)
    if reason:
        return f"{name}: {reason}"
    return (lambda: empty.insert_empty(value, call.node, ctx)), what


def _is_input(value: Node) -> bool:
    """An input, or a view of one."""
    inputs = value.graph.find_nodes(op="placeholder")
    at = storage(value)
    return value.op == "placeholder" or (at is not None and at in map(storage, inputs))
