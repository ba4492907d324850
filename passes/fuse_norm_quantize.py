"""Give RMSNorm with the 1x128 FP8 quantization behind it one op, and the residual's sum before it.

    before: y = rms_norm(x, w); q, scale = quantize_fp8_groups(y)
    after:  q, scale = rms_norm_quantize_fp8(x, w, eps, ...)

    before: h = x + residual; q, scale = quantize_fp8_groups(rms_norm(h, w))
    after:  q, scale, h = add_rms_norm_quantize_fp8(x, residual, w, eps, ...)

Inductor fuses a quantization into what is before it, except into a reduction of another extent: the
norm's over k.
Spellings are not compared. What is before a cast to float8 is run on fakes, and what its ATen ops
compute is compared with what the op's own reference computes (``expressions/``): a match means
equal bits in eager mode on the CPU. All quantizations of one norm become one op.
Legal: nothing else reads the normed activation or what is in between, and nothing writes it.
Bails: another norm or quantization (what differs is named), other readers, autocast, a gradient.
Looks at nothing where the op would run its reference: opaque to Inductor and unfused inside, that
is slower than what it replaces. So the op's kernels decide on which device this fires.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from compile_ext.ops.add_rms_norm_quantize_fp8 import OP as ADD_RMS_NORM_QUANTIZE
from compile_ext.ops.rms_norm_quantize_fp8 import OP as RMS_NORM_QUANTIZE
from compile_ext.passes.context import PassContext
from compile_ext.passes.expressions.nodes import NodeExpressions
from compile_ext.passes.norm_quantize.find import find_candidates
from compile_ext.passes.norms.place_op import NormOp, place_norm
from compile_ext.passes.norms.region import Writers
from compile_ext.passes.op_calls import overload


def fuse_norm_quantize(graph: Graph, ctx: PassContext) -> None:
    candidates = list(find_candidates(graph, NodeExpressions(ctx.scopes)))
    if not candidates:
        return
    writers, replaced = Writers(graph, ctx), dict[Node, Node]()
    for cast, region in candidates:
        if isinstance(region, str):
            ctx.entry(cast)
            ctx.skipped(cast, region)
            continue
        ctx.entry(cast, region.weight)
        results = {expr: i for i, expr in enumerate(region.kinds)}
        ops = NormOp(RMS_NORM_QUANTIZE, ADD_RMS_NORM_QUANTIZE, results)
        call = place_norm(region, ops, writers, replaced, ctx)
        if isinstance(call, str):
            ctx.skipped(cast, call)
            continue
        what = "residual, RMSNorm" if overload(call) is ADD_RMS_NORM_QUANTIZE else "RMSNorm"
        count = len(region.starts)
        more = f" ({count} of them)" * (count > 1)
        ctx.entry(call, region.weight)
        ctx.fired(call, f"{what} and 1x128 quantization{more} in one op")
