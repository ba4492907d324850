"""Whether a kernel may read its weight before its PDL wait, while the one in front still runs."""

from __future__ import annotations

from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.op_calls import OpCall
from compile_ext.passes.values import storage


def why_not_before_wait(call: OpCall, ctx: PassContext) -> str | None:
    """Why a kernel of the graph may be writing what the contract names in ``prewait_reads``, or
    None: all of it lies in inputs of the graph that nothing in it writes."""
    inputs = {storage(x) for x in ctx.root.graph.nodes if x.op == "placeholder"}
    for name in call.contract.prewait_reads:
        value = call.arguments[name]
        if not isinstance(value, Node):
            continue
        if ctx.is_written(value):
            return f"the graph writes {name}"
        if storage(value) not in inputs:
            return f"{name} is not an input of the graph"
    return None
