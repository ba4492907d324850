"""Give the RMSNorm right before a router an op: its kernel lets the router start while it runs.

    before: y = rms_norm(x, w); logits = router_gemm(y, ...)
    after:  y = rms_norm(x, w, eps, ...); logits = router_gemm(y, ...)

    before: h = x + residual; y = rms_norm(h, w); logits = router_gemm(y, ...)
    after:  y, h = add_rms_norm(x, residual, w, eps, ...); logits = router_gemm(y, ...)

    before: y = rms_norm(mixture(blocks, x), w); logits = router_gemm(y, ...)
    after:  y, mixed = attn_residual(x, blocks, ...); logits = router_gemm(y, ...)

The mixture is that of attention residuals (``norms/mixture.py``).
Spellings are not compared, but what nodes compute with what the ops' references compute
(``expressions/``): a match means equal bits in eager mode on the CPU. All other readers of y, the
experts among them, read the op's result.
Legal: nothing else reads what is computed in between, and nothing writes it.
Bails: no RMSNorm before the router (what differs is named), other readers, autocast, a gradient.
Looks at nothing where the op would run its reference, as ``fuse_norm_quantize`` does.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from compile_ext.ops.add_rms_norm import OP as ADD_RMS_NORM
from compile_ext.ops.attn_residual import OP as ATTN_RESIDUAL
from compile_ext.ops.define import why_reference
from compile_ext.ops.rms_norm import OP as RMS_NORM
from compile_ext.ops.router_gemm import OP as ROUTER_GEMM
from compile_ext.ops.router_gemm_m1 import OP as ROUTER_GEMM_M1
from compile_ext.passes.context import PassContext
from compile_ext.passes.expressions.expression import Expr
from compile_ext.passes.expressions.nodes import NodeExpressions
from compile_ext.passes.norms.mixture import find_mixture, place_mixture
from compile_ext.passes.norms.patterns import read_norm
from compile_ext.passes.norms.place_op import NormOp, place_norm
from compile_ext.passes.norms.region import Region, Writers, find_region, why_unfit
from compile_ext.passes.op_calls import OpCall, overload, read_call
from compile_ext.passes.values import tensor

_DETAILS = {
    RMS_NORM: "RMSNorm before a router in one op",
    ADD_RMS_NORM: "residual and RMSNorm before a router in one op",
    ATTN_RESIDUAL: "attention residuals and RMSNorm before a router in one op",
}


def lower_router_norm(graph: Graph, ctx: PassContext) -> None:
    routers = [call for node in graph.nodes if (call := _read_router(node)) is not None]
    if not routers:
        return
    exprs, groups = NodeExpressions(ctx.scopes), dict[Expr, list[OpCall]]()
    for call in routers:
        groups.setdefault(exprs.of(call.arguments["a"]), []).append(call)
    found = [(calls, _find(y, exprs)) for y, calls in groups.items() if not _is_op(y)]
    writers, replaced = Writers(graph, ctx), dict[Node, Node]()
    for calls, regions in found:
        placed = regions if isinstance(regions, str) else _place(regions, writers, replaced, ctx)
        if isinstance(placed, str):
            for call in calls:
                ctx.entry(call.node, call.arguments["b"])
                ctx.skipped(call.node, placed)


def _read_router(node: Node) -> OpCall | None:
    """A router on a device that has a kernel for its norm."""
    call = read_call(node)
    if call is None or call.op not in (ROUTER_GEMM, ROUTER_GEMM_M1):
        return None
    reason = why_reference(RMS_NORM, tensor(call.arguments["a"]), None, 0.0, False)
    return call if reason is None else None


def _is_op(y: Expr) -> bool:
    """Whether an op of these has made it already."""
    source = y.args[0]
    if y.op != "leaf":
        return False
    return any(overload(x) in _DETAILS for x in (source, *source.all_input_nodes[:1]))


def _find(y: Expr, exprs: NodeExpressions) -> tuple[Region, Region | None] | str:
    """The norm that gives y; and with the attention residuals before it, where they are."""
    norm = read_norm(y)
    if isinstance(norm, str):
        return f"no RMSNorm before it: {norm}"
    starts = [x for x in exprs.nodes(y) if _dtype_of(x) == norm.dtype]
    region = find_region(
        starts,
        exprs,
        norm,
        norm.inputs,
        kinds={norm.y: norm.dtype},
        parts={"norm": norm.y},
        numbers=norm.numbers,
    )
    out = tensor(starts[0])
    assert out is not None
    reason = why_unfit(region, out)
    if reason is not None:
        return f"no RMSNorm before it: {reason}"
    return region, find_mixture(starts, exprs, norm)


def _dtype_of(x: Node) -> torch.dtype | None:
    found = tensor(x)
    return None if found is None else found.dtype


def _place(
    found: tuple[Region, Region | None],
    writers: Writers,
    replaced: dict[Node, Node],
    ctx: PassContext,
) -> Node | str:
    norm, mixture = found
    left = ""
    if mixture is not None:
        call = place_mixture(mixture, writers, replaced, ctx)
        if isinstance(call, Node):
            return _fired(call, mixture, "", ctx)
        left = f"; the attention residuals stay: {call}"
    ops = NormOp(RMS_NORM, ADD_RMS_NORM, {norm.norm.y: 0})
    call = place_norm(norm, ops, writers, replaced, ctx)
    return _fired(call, norm, left, ctx) if isinstance(call, Node) else call


def _fired(call: Node, region: Region, more: str, ctx: PassContext) -> Node:
    op = overload(call)
    assert op is not None
    ctx.entry(call, region.weight)
    ctx.fired(call, f"{_DETAILS[op]}{more}")
    return call
