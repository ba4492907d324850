"""Give RMSNorm with the 1x128 FP8 quantization behind it one op, and the residual's sum before it.

    before: y = rms_norm(x, w); q, scale = quantize_fp8_groups(y)
    after:  q, scale = rms_norm_quantize_fp8(x, w, eps, ...)

    before: h = x + residual; q, scale = quantize_fp8_groups(rms_norm(h, w))
    after:  q, scale, h = add_rms_norm_quantize_fp8(x, residual, w, eps, ...)

Inductor fuses a quantization into what is before it, except into a reduction of another extent: the
norm's over k.
Spellings are not compared. What is before a cast to float8 is run on fakes, and what its ATen ops
compute is compared with what the op's own reference computes (``norm_quantize/``): a match means
equal bits in eager mode on the CPU. All quantizations of one norm become one op.
Legal: nothing else reads the normed activation or what is in between, and nothing writes it.
Bails: another norm or quantization (what differs is named), other readers, autocast, a gradient.
Looks at nothing where the op would run its reference: opaque to Inductor and unfused inside, that
is slower than what it replaces. So the op's kernels decide on which device this fires.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.norm_quantize.find import find_candidates
from compile_ext.passes.norm_quantize.forms import same_shape
from compile_ext.passes.norm_quantize.nodes import NodeExpressions
from compile_ext.passes.norm_quantize.place_op import place_op
from compile_ext.passes.norm_quantize.region import Region, Writers
from compile_ext.passes.purity import aten_ops
from compile_ext.passes.values import tensor


def fuse_norm_quantize(graph: Graph, ctx: PassContext) -> None:
    candidates = list(find_candidates(graph, NodeExpressions(ctx.scopes)))
    if not candidates:
        return
    writers = Writers(graph, ctx)
    sums: dict[Node, Node] = {}  # two norms of one sum: the second reads what the first op gives
    for cast, region in candidates:
        if isinstance(region, str):
            ctx.entry(cast)
            ctx.skipped(cast, region)
            continue
        ctx.entry(cast, region.weight)
        region.x = sums.get(region.x, region.x)
        reason = _why_not(region, writers, ctx)
        if reason is not None:
            ctx.skipped(cast, reason)
            continue
        addends = _residual(region, writers, ctx)
        placed = place_op(cast, region, addends, ctx)
        if addends and isinstance(placed, str):
            placed = place_op(cast, region, None, ctx)
        if isinstance(placed, str):
            ctx.skipped(cast, placed)
        else:
            sums[region.x] = placed


def _why_not(region: Region, writers: Writers, ctx: PassContext) -> str | None:
    nodes = region.computed()
    return (
        next((reason for x in nodes if (reason := ctx.stand_back(x))), None)
        or region.why_not_alone()
        or region.why_not_unwritten(writers)
    )


def _residual(region: Region, writers: Writers, ctx: PassContext) -> tuple[Node, Node] | None:
    """The two tensors that x is the sum of, where the op can make that sum."""
    total, addends = region.x, region.x.all_input_nodes
    out, values = tensor(total), [x for x in map(tensor, addends) if x is not None]
    if out is None or len(values) != 2 or len(total.args) != 2 or total.kwargs:
        return None
    if aten_ops(total, ctx.scopes) != [torch.ops.aten.add.Tensor]:
        return None
    if not out.is_contiguous() or not all(_is_like(x, out) for x in values):
        return None
    # The op stands where the sum stood, so that all readers of the sum come behind it.
    if region.weight is not None and not region.weight < total:
        return None
    if ctx.stand_back(total) or region.why_not_unwritten(writers, since=total):
        return None
    return addends[0], addends[1]


def _is_like(x: Tensor, y: Tensor) -> bool:
    return same_shape(x, y) and x.dtype == y.dtype and x.device == y.device
