"""Let kernels fetch their weight while the kernel in front of them still runs.

    before: h = block_scaled_mm(x, w1, ...); y = block_scaled_mm(h, w2, ...)
    after:  h = block_scaled_mm(x, w1, ...); y = block_scaled_mm(h, w2, ..., prefetch=True)

With programmatic dependent launch (PDL) a kernel begins before the one in front has ended, and
waits for it before it reads what that one writes. What the contract names in ``prewait_reads``, the
weight, may be read before the wait if no kernel that can still be running then writes it. The
kernels of GEMMs and norms do that; a norm without a weight just begins early.
Legal: these arguments are inputs of the graph that it does not write, and the call computes with
the numbers of an earlier one that starts without the attribute, so after everything in front of it
has ended: a refresh of derived constants or a merge of adapters right before the graph, whoever
wrote it. The first call of a graph is such a one. Numbers, not position: the compiler may reorder
what is independent, and leave out a call whose result nobody computes with.
Bails: the first call; a weight that the graph writes or computes; earlier calls that may have no
tokens, and then launch no kernel; ``compile_ext.pdl`` is False, or ``triton.enable_pdl`` True.
Looks at nothing where the device has no PDL.
"""

from __future__ import annotations

import operator

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from compile_ext.ops import triton_support
from compile_ext.ops.define import PREFETCH
from compile_ext.passes.context import PassContext
from compile_ext.passes.op_calls import OpCall, overload, read_call
from compile_ext.passes.prewait import Prewait
from compile_ext.passes.purity import aten_ops
from compile_ext.passes.values import bounds, fake, tensor

aten = torch.ops.aten
# Computed from all arguments, and not pointwise by torch's tag.
_COMPUTES = {
    aten._to_copy.default, aten.clone.default, aten.cat.default, aten.constant_pad_nd.default,
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten._softmax.default,
    aten.native_layer_norm.default, aten._fused_rms_norm.default, aten.index.Tensor,
    aten.index_select.default, aten.gather.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip


def prefetch_weights(graph: Graph, ctx: PassContext) -> None:
    prewait = Prewait(ctx)
    behind: set[Node] = set()  # what is computed from a call that launches a kernel
    for node in list(graph.nodes):
        is_behind = any(x in behind and not ctx.is_written(x) for x in node.all_input_nodes)
        call = read_call(node)
        if call is None or not _can_prefetch(call):
            if is_behind and _computes(node, ctx):
                behind.add(node)
            continue
        ctx.entry(node, call.arguments[call.contract.prewait_reads[0]])
        reason = ctx.stand_back(node) or _why_not(call, is_behind, prewait, ctx)
        if is_behind or _starts_a_chain(call):
            behind.add(node)
        if reason:
            if ctx.why_no_pdl is not None and call.arguments[PREFETCH]:
                ctx.rewrite(call, {PREFETCH: False})
            ctx.skipped(node, reason)
            continue
        ctx.rewrite(call, {PREFETCH: True})
        ctx.fired(node, "a kernel that can fetches the weight before its PDL wait")


def _computes(node: Node, ctx: PassContext) -> bool:
    """Whether what a node gives is computed from the numbers of its inputs, so that the compiler
    cannot leave out what they come from. Not so ``zeros_like``, a fill, a copy into a buffer, an
    empty slice."""
    if not _has_elements(node):
        return False
    if node.target is operator.getitem:
        return True
    op = overload(node)
    if op is not None and op.namespace not in ("aten", "prims"):  # the compiler cannot look inside
        return not op._schema.is_mutable
    ops = aten_ops(node, ctx.scopes)  # None of a call that writes what it is given
    return ops is not None and bool(ops) and all(map(_is_computation, ops))


def _is_computation(op: OpOverload) -> bool:
    """Copies and fills are not tagged as pointwise."""
    return op.is_view or torch.Tag.pointwise in op.tags or op in _COMPUTES


def _can_prefetch(call: OpCall) -> bool:
    if PREFETCH not in call.arguments or not call.contract.prewait_reads:
        return False
    x = next((x for x in map(tensor, call.arguments.values()) if x is not None), None)
    return x is not None and triton_support.has_pdl(x)


def _why_not(call: OpCall, is_behind: bool, prewait: Prewait, ctx: PassContext) -> str | None:
    if ctx.why_no_pdl is not None:
        return ctx.why_no_pdl
    if call.arguments[PREFETCH]:
        return "the call says so itself"
    if not is_behind:
        return "what ran before the graph may still write the weight"
    return prewait.why_not(call)


def _starts_a_chain(call: OpCall) -> bool:
    """Whether it certainly launches a kernel, which starts after everything before it: one result
    with elements is enough (without a residual, the sum of ``rms_norm_router`` has none)."""
    return not call.arguments[PREFETCH] and any(_have_elements(call.node))


def _has_elements(node: Node) -> bool:
    """Whether a result certainly has some; of several results, each."""
    found = _have_elements(node)
    return bool(found) and all(found)


def _have_elements(node: Node) -> list[bool]:
    """Of each result, whether it certainly has some."""
    found = fake(node)
    parts = found if isinstance(found, (tuple, list)) else [found]
    tensors = [x for x in parts if isinstance(x, torch.Tensor)]
    return [all(bounds(size)[0] >= 1 for size in x.shape) for x in tensors]
