"""Let kernels fetch their weight while the kernel in front of them still runs.

    before: h = block_scaled_mm(x, w1, ...); y = block_scaled_mm(h, w2, ...)
    after:  h = block_scaled_mm(x, w1, ...); y = block_scaled_mm(h, w2, ..., prefetch=True)

With programmatic dependent launch (PDL) a kernel begins before the one in front has ended, and
waits for it before it reads what that one writes. What the contract names in ``prewait_reads``, the
weight, may be read before the wait if no kernel that can still be running then writes it.
Legal: these arguments are inputs of the graph that it does not write, and the call depends on an
earlier one that starts without the attribute, so after everything in front of it has ended: a
refresh of derived constants or a merge of adapters right before the graph, whoever wrote it. The
first call of a graph is such a one. Dependence, not position: the compiler may reorder what is
independent.
Bails: the first call; a weight that the graph writes or computes; earlier calls that may have no
tokens, and then launch no kernel.
Looks at nothing where the device has no PDL.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from compile_ext.ops import triton_support
from compile_ext.ops.contract import m_of_gemm
from compile_ext.ops.define import PREFETCH
from compile_ext.passes.context import PassContext
from compile_ext.passes.op_calls import OpCall, read_call
from compile_ext.passes.prewait import why_not_before_wait
from compile_ext.passes.values import bounds, tensor


def prefetch_weights(graph: Graph, ctx: PassContext) -> None:
    behind: set[Node] = set()  # what depends on a call that launches a kernel
    for node in list(graph.nodes):
        is_behind = any(x in behind for x in node.all_input_nodes)
        call = read_call(node)
        if call is None or not _can_prefetch(call):
            if is_behind:
                behind.add(node)
            continue
        assert call.contract.gemm is not None  # what a kernel prefetches is a GEMM's
        ctx.entry(node, call.arguments[call.contract.gemm.b])
        reason = ctx.stand_back(node) or _why_not(call, is_behind, ctx)
        if is_behind or _has_tokens(call):
            behind.add(node)
        if reason:
            ctx.skipped(node, reason)
            continue
        ctx.rewrite(call, {PREFETCH: True})
        ctx.fired(node, "a kernel that can fetches the weight before its PDL wait")


def _can_prefetch(call: OpCall) -> bool:
    if PREFETCH not in call.arguments or call.contract.gemm is None:
        return False
    a = tensor(call.arguments[call.contract.gemm.a])
    return a is not None and triton_support.has_pdl(a)


def _why_not(call: OpCall, is_behind: bool, ctx: PassContext) -> str | None:
    if call.arguments[PREFETCH]:
        return "the call says so itself"
    if not is_behind:
        return "what ran before the graph may still write the weight"
    return why_not_before_wait(call, ctx)


def _has_tokens(call: OpCall) -> bool:
    gemm = call.contract.gemm
    assert gemm is not None
    a = tensor(call.arguments[gemm.a])
    return a is not None and bounds(m_of_gemm(call.op, gemm, a))[0] >= 1
