"""Make a constant that a kernel reads once, and not on each call.

    before: y = op(x, w, torch.ones(1))                   after: y = op(x, w, ones')

ones' is an extra input, one constant for all sites of one text. Fills that only generated code
reads stay: Inductor computes them in the kernel that reads them.
"""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.derivation import Derivation
from compile_ext.passes.effects import written_arguments
from compile_ext.passes.op_calls import FUNCTIONALIZED, overload
from compile_ext.passes.parameter_math import ParameterMath, Result, put_constants
from compile_ext.passes.purity import aten_ops
from compile_ext.passes.readers import is_constant
from compile_ext.passes.values import requires_grad, storage

# The GEMMs, convolutions and attentions among the ATen ops that Inductor calls as they are, with
# memory for each argument.
_CALLED = {
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_grouped_mm"),
        *("_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm_v2", "_int_mm"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    )
}


def fold_constants(graph: Graph, ctx: PassContext) -> None:
    """Replace what is filled with numbers of the model's code, and read by a kernel that needs it
    in memory, by constants."""
    if not any(map(is_constant, graph.nodes)):
        return
    math = ParameterMath(graph, ctx)
    folded: list[tuple[Result, Derivation]] = []
    for result in math.constants():
        if not any(map(is_constant, result.nodes)):
            continue
        readers = math.readers(result)
        reader = next((x for x in readers if _needs_memory(x, result, ctx)), None)
        if reader is None:
            continue
        how = result.derivation()
        reason = _why_not(result, readers, math, ctx) or ctx.charge(((), how))
        if reason:
            ctx.skipped(reader, f"{how}, which it is given, is made on each call: {reason}")
        else:
            ctx.fired(reader, f"{how}, which it is given, is a constant")
            folded.append((result, how))
    put_constants(folded, ctx)


def _why_not(
    result: Result, readers: list[Node], math: ParameterMath, ctx: PassContext
) -> str | None:
    reason = result.why_not_derivable(ctx) or math.why_not(result)
    if reason:
        return reason
    captured = next((x for x in readers if _captures(x)), None)
    if captured is not None:
        return f"{captured.target} captures it"
    if ctx.is_leaving(result.node):
        return "the graph hands it out"
    if any(map(requires_grad, result.nodes)):
        return "it requires grad"
    return None


def _needs_memory(node: Node, result: Result, ctx: PassContext) -> bool:
    """Whether a kernel reads what this node is given: no code that Inductor generates."""
    if any(storage(x) == storage(result.node) for x in written_arguments(node)):
        return False  # a buffer for its output
    target: Any = node.target
    if target in FUNCTIONALIZED:  # the op reads what it is given, and copies what it writes
        op: Any = node.args[0]
        read = {a.name for a in op._schema.arguments}
        given = [x for name, x in node.kwargs.items() if name in read]
        if not any(storage(x) == storage(result.node) for x in given):
            return False
        target = op
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        name = target._qualified_op_name if isinstance(target, OpOverloadPacket) else target.name()
        if name.split("::")[0] not in ("aten", "prims"):
            return True
    if _captures(node):
        return True  # its body may be a kernel: the reason says that it was seen
    ops = [overload(node), *(aten_ops(node, ctx.scopes) or [])]  # of ``out=`` only the first
    return any(op is not None and op._schema.name in _CALLED for op in ops)


def _captures(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target not in FUNCTIONALIZED
