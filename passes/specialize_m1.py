"""Call an op's M == 1 variant where M is statically 1, the shape of decode.

    before: y = router_gemm(x [1, k], w)           after: y = router_gemm_m1(x [1, k], w)

Dynamo compiles M == 1 into a graph of its own (0/1 specialisation), so this costs no guard and no
recompile.
Legal: the contract names a variant. One of other packages may read ``prewait_reads`` before its PDL
wait, so these are inputs of the graph that it does not write. (Ours do where ``prefetch_weights``
says so. router_gemm_m1 runs router_gemm's kernels so far.)
Bails: M is not 1 or not static; the graph writes the weight, or it is no input of the graph.
"""

from __future__ import annotations

from torch.fx import Graph

from compile_ext.ops.contract import m_of_gemm
from compile_ext.passes.context import PassContext
from compile_ext.passes.op_calls import OpCall, read_call
from compile_ext.passes.prewait import Prewait
from compile_ext.passes.values import bounds, range_text, tensor


def specialize_m1(graph: Graph, ctx: PassContext) -> None:
    prewait = Prewait(ctx)
    for node in list(graph.nodes):
        call = read_call(node)
        if call is None or call.contract.m1_variant is None:
            continue
        assert call.contract.gemm is not None  # register_contract saw to it
        ctx.entry(node, call.arguments[call.contract.gemm.b])
        reason = ctx.stand_back(node) or _why_not(call, prewait, ctx)
        if reason:
            ctx.skipped(node, reason)
            continue
        ctx.rewrite(call, {}, op=call.contract.m1_variant)
        ctx.fired(node, f"M == 1: {call.contract.m1_variant._schema.name}")


def _why_not(call: OpCall, prewait: Prewait, ctx: PassContext) -> str | None:
    if ctx.batch_invariant:
        return "compile_ext.batch_invariant wants one op for every M"
    gemm = call.contract.gemm
    assert gemm is not None
    a = tensor(call.arguments[gemm.a])
    if a is None:
        return "its activation is not a tensor"
    low, high = bounds(m_of_gemm(call.op, gemm, a))
    if (low, high) != (1, 1):
        return f"M = {low}" if low == high else f"M is {range_text(low, high)}"
    return prewait.why_not(call)
