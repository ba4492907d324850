"""The sum of a residual stream before a norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.expressions.forms import same_shape
from compile_ext.passes.norms.region import Region, Writers
from compile_ext.passes.purity import aten_ops
from compile_ext.passes.values import tensor


def addends_of(region: Region, writers: Writers, ctx: PassContext) -> tuple[Node, Node] | None:
    """The two tensors that x is the sum of, where an op can make that sum."""
    total = region.nodes_of["x"]
    addends = total.all_input_nodes
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
