"""Put the op in the place of a norm and its quantizations, or leave the graph as it was."""

from __future__ import annotations

import operator

from torch.fx import Node

from compile_ext.ops.add_rms_norm_quantize_fp8 import OP as ADD_RMS_NORM_QUANTIZE
from compile_ext.ops.rms_norm_quantize_fp8 import OP as RMS_NORM_QUANTIZE
from compile_ext.passes.context import PassContext
from compile_ext.passes.norm_quantize.fit_result import fit_result
from compile_ext.passes.norm_quantize.region import Region
from compile_ext.passes.values import storage, tensor

_Q, _SCALE, _SUM = range(3)  # the op's results


def place_op(
    cast: Node, region: Region, addends: tuple[Node, Node] | None, ctx: PassContext
) -> Node | str:
    """With ``addends``, whose sum x is, the op makes the sum as well. Gives what x is from now on,
    or the reason why not."""
    before = region.x if addends else min(n for n in region.computed() if n in region.results)
    mark = before.prev
    call = _call(region, addends, before, ctx)
    placed = _results(call, region, addends, before, ctx)
    if isinstance(placed, str):
        while before.prev is not mark:
            before.graph.erase_node(before.prev)
        return placed
    for number in (*region.norm.inputs, *region.quantization.inputs):
        number.guard()
    left = [*region.nodes(), *region.reads, *region.x.all_input_nodes]
    ctx.report.moved(cast, call)
    for old, new in placed.items():
        ctx.replace(old, new)
    ctx.erase_dead(reversed(left))
    what = "residual, RMSNorm" if addends else "RMSNorm"
    count = len(region.casts)
    ctx.entry(call, region.weight)
    ctx.fired(call, f"{what} and 1x128 quantization{f' ({count} of them)' * (count > 1)} in one op")
    return placed[region.x] if addends else region.x


def _call(
    region: Region, addends: tuple[Node, Node] | None, before: Node, ctx: PassContext
) -> Node:
    norm, weight = region.norm, region.weight
    op = ADD_RMS_NORM_QUANTIZE if addends else RMS_NORM_QUANTIZE
    rows = [_reshaped(x, before, ctx, -1, norm.k) for x in addends or (region.x,)]
    weight = None if weight is None else _reshaped(weight, before, ctx, norm.k)
    like = region.casts[0]
    return ctx.insert(before, op, *rows, weight, norm.eps, norm.round_before_weight, like=like)


def _reshaped(x: Node, before: Node, ctx: PassContext, *shape: int) -> Node:
    found = tensor(x)
    assert found is not None
    return x if found.dim() == len(shape) else ctx.insert(before, "reshape", x, *shape, like=x)


def _results(
    call: Node,
    region: Region,
    addends: tuple[Node, Node] | None,
    before: Node,
    ctx: PassContext,
) -> dict[Node, Node] | str:
    """What comes in the place of each node that others read."""
    lender = addends[0] if addends else region.x
    numbers = {x: _Q if region.results[x] is region.q else _SCALE for x in region.ends()}
    if addends:
        numbers[region.x] = _SUM
    parts: dict[int, Node] = {}
    leaving: dict[int, int | None] = {}
    placed: dict[Node, Node] = {}
    for old, number in numbers.items():
        if number not in parts:
            parts[number] = ctx.insert(before, operator.getitem, call, number, like=old)
        if ctx.is_leaving(old) and leaving.setdefault(number, storage(old)) != storage(old):
            return "the graph hands out two tensors that would be one"  # the caller may write one
        new = fit_result(parts[number], old, lender, before, ctx)
        if isinstance(new, str):
            return new
        placed[old] = new
    return placed
