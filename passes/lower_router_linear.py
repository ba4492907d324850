"""Give the router of a mixture-of-experts layer its own op: float32 logits, never rounded.

    before: float(linear(x, w))                   after: router_gemm(x, w)
    before: softmax(linear(x, w), dtype=float32)  after: softmax(router_gemm(x, w), dtype=float32)
    before: topk(linear(x, w))                    after: topk(bfloat16(router_gemm(x, w)))
    before: linear(float(x), float(w))            after: router_gemm(x, float(w))

In every spelling (``linears.py``). A candidate is a linear whose output becomes scores
(``router_linear/candidates.py``), or that ``compile_ext.mark_router`` names; others are not listed.
Legal: x and w are bfloat16 or float32, and N is at most 2048. Who converts the logits to float32
reads those of the op: closer to exact than the original, by up to 2^-9 relative. Who reads them in
bfloat16 gets them rounded, as before but for the order of the sum. A float32 product stays one of
float32, unless ``compile_ext.bf16_router`` allows bfloat16 (``router_linear/operands.py``).
Bails: other dtypes, a product of two activations, autocast, a gradient.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from compile_ext.ops.router_gemm import OP as ROUTER_GEMM
from compile_ext.passes.context import PassContext
from compile_ext.passes.linears import Linear, is_product
from compile_ext.passes.readers import op_name
from compile_ext.passes.router_linear.candidates import is_candidate, linear_at
from compile_ext.passes.router_linear.logits import hand_out
from compile_ext.passes.router_linear.marks import report_marked
from compile_ext.passes.router_linear.operands import operands_of
from compile_ext.passes.values import dtype_name, is_static, tensor

MAX_EXPERTS = 2048  # a wider linear is a projection or an LM head
_DTYPES = (torch.bfloat16, torch.float32)


def lower_router_linear(graph: Graph, ctx: PassContext) -> None:
    for node in list(graph.nodes):
        linear = None if node._erased else linear_at(node, ctx)
        if linear is None or not is_candidate(node, linear, ctx):
            continue
        ctx.entry(node, linear.weight)
        reason = ctx.stand_back(node) or ctx.stand_back(linear.product)
        reason = reason or _why_not(linear, ctx)
        if reason:
            ctx.skipped(node, reason)
        else:
            _lower(node, linear, ctx)
    if graph is ctx.scopes[-1].graph:
        report_marked(ctx)


def _lower(node: Node, linear: Linear, ctx: PassContext) -> None:
    operands = operands_of(linear, node, ctx)
    router = ctx.insert(node, ROUTER_GEMM, operands.a, operands.b, operands.bias, like=node)
    ctx.report.moved(node, router)
    out = tensor(node)
    assert out is not None
    # Names of ops, before they are rewritten: another model gives its nodes other names.
    rounded = dict.fromkeys(op_name(u.target) for u in hand_out(node, router, ctx))
    said = f"logits in float32, {dtype_name(out)} for {', '.join(rounded)}"
    details = (said if rounded else "logits stay in float32", operands.note)
    ctx.fired(router, "; ".join(filter(None, details)))


def _why_not(linear: Linear, ctx: PassContext) -> str | None:
    x, weight = tensor(linear.x), tensor(linear.weight)
    if x is None or weight is None or weight.dim() != 2:
        return "its weight is not a matrix"
    if x.dtype not in _DTYPES or weight.dtype not in _DTYPES:
        names = f"x is {dtype_name(x)} and the weight {dtype_name(weight)}"
        return f"{names}, not bfloat16 or float32"
    for name, found in (("x", x), ("the weight", weight)):
        if is_traceable_wrapper_subclass(found):
            return f"{name} is a tensor subclass ({type(found).__name__})"
    n = weight.shape[0 if linear.layout == "nt" else 1]
    if not is_static(n) or n > MAX_EXPERTS:
        return f"N={n} is more than {MAX_EXPERTS}: not a router"
    if x.device != weight.device:
        return "x and the weight are on different devices"
    if is_product(linear.product) and not _is_parameter(linear.weight, ctx):
        return "a product with what is no parameter or buffer: not a router"
    return None


def _is_parameter(weight: Node, ctx: PassContext) -> bool:
    roots = ctx.root_inputs(weight)
    return bool(roots) and all(map(ctx.is_static, roots))
