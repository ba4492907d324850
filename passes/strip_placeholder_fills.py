"""Strip what an op is handed and never reads: placeholder arguments, and fills of buffers it
overwrites.

    before: s = x.new_ones(1); y = op(x, w, s)           after: y = op(x, w, None)     Tensor? s
                                                                y = op(x, w, empty(1))   schema:
                                                                Tensor s
    before: out = zeros(m, n); op_out(x, w, out)         after: out = empty(m, n); op_out(x, w, out)

Legal: the op's contract says, for these static arguments, that it leaves the argument unread (or
overwrites it in full). Only the argument is replaced: other readers of the fill keep it.
Bails: the argument is read; it is no fill and the schema wants a tensor; the size is symbolic; the
buffer is read before the op overwrites it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from compile_ext.ops.contract import is_optional, is_unread
from compile_ext.passes.context import PassContext
from compile_ext.passes.readers import OpCall, is_empty, is_fill, read_call
from compile_ext.passes.values import fakes, is_static, storage, tensor


def strip_placeholder_fills(graph: Graph, ctx: PassContext) -> None:
    for node in list(graph.nodes):
        call = read_call(node)
        if call is None:
            continue
        weight = call.arguments[call.contract.gemm.b] if call.contract.gemm else None
        for name in call.contract.unread:
            ctx.entry(node, weight)
            _strip_argument(call, name, ctx)
        for name in call.contract.overwritten:
            ctx.entry(node, weight)
            _strip_fill(call, name, ctx)


def _strip_argument(call: OpCall, name: str, ctx: PassContext) -> None:
    value = call.arguments[name]
    if not isinstance(value, Node):
        return  # None: nothing is handed over
    if not is_unread(call.op, call.contract, name, fakes(call.arguments)):
        ctx.skipped(call.node, f"{name} is read")
        return
    reason = ctx.stand_back(call.node)
    if reason is None and not is_optional(call.op, name):
        reason = _why_no_empty(name, value)
    if reason:
        ctx.skipped(call.node, reason)
        return
    replacement = None if is_optional(call.op, name) else _empty_like(call.node, value, ctx)
    ctx.rewrite(call, {name: replacement})
    became = "None" if replacement is None else "uninitialised"
    ctx.fired(call.node, f"{name} is not read: {became}")


def _why_no_empty(name: str, value: Node) -> str | None:
    if is_empty(value):
        return f"{name} is uninitialised already"
    if not is_fill(value):
        return f"{name} is not a fill, and the schema wants a tensor"
    found = tensor(value)
    if found is None or not all(is_static(s) for s in found.shape):
        return f"{name} has a symbolic size"
    return None


def _empty_like(before: Node, value: Node, ctx: PassContext) -> Node:
    found: Any = tensor(value)
    shape, strides = (tuple(map(int, x)) for x in (found.shape, found.stride()))
    return ctx.insert(
        before, torch.empty_strided, shape, strides, dtype=found.dtype, device=found.device
    )


def _strip_fill(call: OpCall, name: str, ctx: PassContext) -> None:
    buffer = call.arguments[name]
    if not isinstance(buffer, Node) or not is_fill(buffer):
        return
    reason = ctx.stand_back(call.node) or _why_not_first(call, name, buffer)
    found = tensor(buffer)
    if reason is None and (found is None or not all(is_static(s) for s in found.shape)):
        reason = f"{name} has a symbolic size"
    if reason:
        ctx.skipped(call.node, reason)
        return
    ctx.fired(call.node, f"{name} is overwritten in full: its fill is gone")
    ctx.replace(buffer, _empty_like(buffer, buffer, ctx))


def _why_not_first(call: OpCall, name: str, buffer: Node) -> str | None:
    """Whether anything before the op, or the op itself, reads the buffer or a view of it."""
    for other, value in call.arguments.items():
        if other != name and isinstance(value, Node) and storage(value) == storage(buffer):
            return f"the op reads the buffer as {other}"
    at = buffer.next
    while at is not call.node:
        for x in at.all_input_nodes:
            if x is buffer or storage(x) == storage(buffer):
                return "the buffer is used before the op overwrites it"
        at = at.next
    return None
