"""Strip what costs a kernel and tells an op nothing: arguments that it does not read, fills of
buffers that it overwrites, constants that are made on each call.

    before: op(x, w, x.new_ones(1))         after: op(x, w, None), or an uninitialised buffer
    before: op_out(x, w, zeros(m, n))       after: op_out(x, w, empty(m, n))
    before: op(x, w, torch.ones(1))         after: op(x, w, ones')    ones' is made once

One file each in ``fills/``. What computed a stripped argument goes too, unless others read it.
Legal: the op's contract says, for these static arguments, that it leaves the argument unread, or
overwrites it in full. Only this use is replaced: other readers of a fill keep it.
Bails: the argument is read; autocast, a gradient; a size that depends on data; a buffer that is
read before the op, or is larger than what the op overwrites; a constant that is written, returned
or captured by a higher-order op.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.fills.constant_fills import fold_constants
from compile_ext.passes.fills.overwritten_outputs import strip_fill
from compile_ext.passes.fills.unread_arguments import strip_argument, why_kept
from compile_ext.passes.op_calls import read_call


def strip_placeholder_fills(graph: Graph, ctx: PassContext) -> None:
    stripped: list[tuple[Node, str, Node]] = []
    for node in list(graph.nodes):
        call = read_call(node)
        if call is None or not (call.contract.unread or call.contract.overwritten):
            continue
        # Even where nothing is said of it: the row of a GEMM has the name of its weight.
        ctx.entry(node, call.arguments[call.contract.gemm.b] if call.contract.gemm else None)
        for name in call.contract.unread:
            value = strip_argument(call, name, ctx)
            if value is not None:
                stripped.append((node, name, value))
        for name in call.contract.overwritten:
            strip_fill(call, name, ctx)
    for node, name, value in stripped:
        reason = why_kept(value, ctx)
        if reason:
            ctx.skipped(node, f"what fills {name} stays: {reason}")
    fold_constants(graph, ctx)
