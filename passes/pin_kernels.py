"""Name the kernel of an op's calls, where the user has pinned one (``compile_ext.kernels``), or
``compile_ext.batch_invariant`` has.

    before: y = scaled_mm(a, b, ..., dtype)          after: y = scaled_mm(a, b, ..., dtype, "aten")

Legal: always; a kernel that cannot run the call is an error when the graph is compiled, or when it
runs where that depends on M.
Bails: the call names a kernel itself. With batch_invariant, every GEMM without that kernel is
reported.
"""

from __future__ import annotations

from torch.fx import Graph

from compile_ext.ops.define import PINNED, definition_of
from compile_ext.passes.context import PassContext
from compile_ext.passes.op_calls import read_call


def pin_kernels(graph: Graph, ctx: PassContext) -> None:
    for node in list(graph.nodes) if ctx.kernels else ():
        call = read_call(node)
        definition = definition_of(call.op) if call is not None else None
        kernel = None
        if definition is not None:
            kernel = ctx.kernels.get(definition.name) or ctx.kernels.get(definition.family)
        if call is None or kernel is None:
            if ctx.batch_invariant and call is not None and call.contract.gemm is not None:
                ctx.skipped(node, "compile_ext.batch_invariant does not reach this op")
            continue
        named = call.arguments[PINNED]
        reason = ctx.stand_back(node) or (f"the call names {named}" if named else None)
        if reason:
            ctx.skipped(node, reason)
            continue
        ctx.rewrite(call, {PINNED: kernel})
        ctx.fired(node, f"kernel {kernel}")
