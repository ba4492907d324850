"""Turn the padding of weights into derived constants: nothing is padded per call.

    before: y = op(x, pad(w), pad(scale), pad(bias))     after: y = op(x, w', scale', bias')

    before: y = op(x, w, scale, bias)    with N or K not a multiple that the op's contract asks for
    after:  y = op(pad_k(x), w', scale', bias')[:, :N].clone()    w', ... are extra inputs

Legal: the source is a parameter or buffer, nothing in the graph writes it, and no gradient is
needed. A derived constant hangs on the parameter and follows it (``compile_ext.derived``); the
slice is copied, so that every reader and every output sees the strides of the original graph.
Bails: a computed weight, an activation weight, a symbolic N or K, an argument whose padded axis is
ambiguous.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from compile_ext.ops.contract import Gemm, Pad
from compile_ext.passes.context import PassContext
from compile_ext.passes.derivation import Padding
from compile_ext.passes.readers import OpCall, read_call, read_pad, read_transpose
from compile_ext.passes.values import is_static, tensor

Widths = dict[int, tuple[int, float]]  # axis -> (new elements at its end, their value)


def fold_weight_padding(graph: Graph, ctx: PassContext) -> None:
    for node in list(graph.nodes):
        _fold_pad(node, ctx)
    for node in list(graph.nodes):
        call = read_call(node)
        if call is not None and call.contract.gemm is not None and call.contract.align:
            _fold_alignment(call, call.contract.gemm, ctx)


def _fold_pad(node: Node, ctx: PassContext) -> None:
    """A pad that the user wrote."""
    call = read_pad(node)
    if call is None or call.x.op != "placeholder":
        return
    if ctx.root_inputs(call.x) and not ctx.is_parameter(call.x):
        return  # an activation; inside a closed body it cannot be told, and the reason says so
    ctx.entry(node, call.x)
    reason = ctx.stand_back(node) or ctx.why_not_derivable(call.x) or ctx.why_not_shared(node)
    if reason:
        ctx.skipped(node, reason)
        return
    how = Padding(call.pad, call.value)
    ctx.fired(node, f"{how} of a parameter is a derived constant")
    ctx.replace(node, ctx.derive(call.x, how))


def _fold_alignment(call: OpCall, gemm: Gemm, ctx: PassContext) -> None:
    node, b = call.node, tensor(call.arguments[gemm.b])
    ctx.entry(node, call.arguments[gemm.b])
    if b is None or b.dim() != 2:
        ctx.skipped(node, f"{gemm.b} is not a matrix")
        return
    sizes = dict(zip("nk" if gemm.layout == "nt" else "kn", b.shape, strict=True))
    if not all(is_static(sizes[d]) for d in call.contract.align):
        ctx.skipped(node, "N or K is symbolic")
        return
    grow = {d: -int(sizes[d]) % a.multiple for d, a in call.contract.align.items()}
    if not any(grow.values()):
        ctx.skipped(node, f"N={sizes['n']}, K={sizes['k']} need no padding")
        return
    align = call.contract.align
    # In schema order, never in that of a set: the order of the extra inputs is part of the caches'
    # key.
    names = [x for x in call.arguments if any(grow[d] and x in a.pad for d, a in align.items())]
    widths = {x: _widths(x, call.arguments[x], gemm, sizes, grow, align) for x in names}
    reason = ctx.stand_back(node) or next((w for w in widths.values() if isinstance(w, str)), None)
    source, _ = _matrix_source(call.arguments[gemm.b])
    reason = reason or ctx.why_not_derivable(source)
    if reason:
        ctx.skipped(node, reason)
        return
    changes = {
        name: _padded(node, call.arguments[name], w, ctx)
        for name, w in widths.items()
        if isinstance(w, dict) and w
    }
    ctx.rewrite(call, changes)
    what = ", ".join(f"{d.upper()} {sizes[d]} -> {sizes[d] + g}" for d, g in grow.items() if g)
    ctx.fired(node, f"{what}: {', '.join(sorted(changes))} padded")
    if grow.get("n"):
        _cut_output(node, int(sizes["n"]), ctx)


def _widths(
    name: str, value: Any, gemm: Gemm, sizes: dict[str, Any], grow: dict[str, int], align: Any
) -> Widths | str:
    """How far each axis of one argument grows, or why that cannot be told."""
    found = tensor(value)
    if value is None:
        return {}
    if found is None:
        return f"{name} is not a tensor"
    widths: Widths = {}
    for dim, spec in ((d, a.pads()[name]) for d, a in align.items() if grow[d] and name in a.pad):
        one = all(is_static(s) and s == 1 for s in found.shape)
        if one and name in (gemm.scale_a, gemm.scale_b):
            continue  # one scale for the whole tensor
        blocks = -(-int(sizes[dim]) // spec.block)
        axis = _axis(name, found.shape, gemm, dim, spec, blocks)
        if isinstance(axis, str):
            return axis
        extra = -(-(int(sizes[dim]) + grow[dim]) // spec.block) - blocks
        if extra:
            widths[axis] = (extra, spec.value)
    if len({v for _, v in widths.values()}) > 1:
        return f"{name} would need two pad values"
    return widths


def _axis(name: str, shape: Any, gemm: Gemm, dim: str, spec: Pad, size: int) -> int | str:
    if spec.axis is not None:
        axes = [spec.axis % len(shape)] if -len(shape) <= spec.axis < len(shape) else []
    elif name == gemm.a:
        axes = [len(shape) - 1]
    elif name == gemm.b:
        axes = [("nk" if gemm.layout == "nt" else "kn").index(dim)]
    else:
        axes = [i for i, s in enumerate(shape) if is_static(s) and s == size]
    if len(axes) != 1 or not is_static(shape[axes[0]]) or shape[axes[0]] != size:
        return f"{name} of shape {list(shape)} has no single axis of {size} for {dim.upper()}"
    return axes[0]


def _matrix_source(value: Any) -> tuple[Any, bool]:
    """The node to derive from, and whether the argument is its transposed view."""
    source = read_transpose(value)
    return (value, False) if source is None else (source, True)


def _padded(node: Node, value: Node, widths: Widths, ctx: PassContext) -> Node:
    """The argument grown by ``widths``: a derived constant where it can be one, else a pad in the
    graph.
    """
    source, transposed = _matrix_source(value)
    rank = tensor(source).dim()  # type: ignore[union-attr]
    pad = [0] * (2 * rank)
    fill = 0.0
    for axis, (extra, fill_value) in widths.items():
        at = 1 - axis if transposed else axis
        pad[2 * (rank - 1 - at) + 1] = extra
        fill = fill_value
    while pad[-2:] == [0, 0]:  # F.pad counts from the last dimension: no width for those that stay
        pad = pad[:-2]
    if ctx.why_not_derivable(source) is None:
        derived = ctx.derive(source, Padding(tuple(pad), fill, keep_order=True))
        return ctx.insert(node, "t", derived) if transposed else derived
    padded = ctx.insert(node, F.pad, source, pad, value=fill)
    return ctx.insert(node, "t", padded) if transposed else padded


def _cut_output(node: Node, n: int, ctx: PassContext) -> None:
    """``y -> y[..., :n].contiguous()``: Inductor fuses the copy into pointwise readers."""
    following = node.next
    cut = ctx.insert(following, operator.getitem, node, (..., slice(None, n)), like=node)
    # Not contiguous(): it leaves [1, n] with a row stride of the padded n, as torch calls that
    # contiguous.
    whole = ctx.insert(following, "clone", cut, memory_format=torch.contiguous_format, like=node)
    node.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not cut)
    ctx.stands_for(whole, node)
