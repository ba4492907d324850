"""Whether a kernel may read its weight before its PDL wait, while the one in front still runs."""

from __future__ import annotations

from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.op_calls import OpCall
from compile_ext.passes.values import storage


def why_not_before_wait(call: OpCall, ctx: PassContext) -> str | None:
    """Why a kernel of the graph may be writing what the contract names in ``prewait_reads``, or
    None: all of it lies in inputs of the graph that nothing in it writes."""
    for name in call.contract.prewait_reads:
        value = call.arguments[name]
        if not isinstance(value, Node):
            continue
        if ctx.is_written(value):
            return f"the graph writes {name}"
        if not _is_input(value, ctx):
            return f"{name} is not an input of the graph"
    return None


def _is_input(value: Node, ctx: PassContext) -> bool:
    """Whether a tensor lies in an input of the root, or is handed into its body from one."""
    (scope,) = [x for x in ctx.scopes if x.graph is value.graph]
    places = [storage(x) for x in scope.placeholders()]
    if storage(value) not in places:
        return False
    if value.graph is ctx.root.graph:
        return True
    at = places.index(storage(value))
    handed = [call.operands() for call in scope.calls]
    return bool(handed) and all(
        x is not None and at < len(x) and isinstance(x[at], Node) and _is_input(x[at], ctx)
        for x in handed
    )
