"""What a router's op multiplies: the bfloat16 that a float32 activation was, and a weight that
stays float32, or becomes bfloat16 where the user allows it (``compile_ext.bf16_router``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.derivation import Program
from compile_ext.passes.linears import Linear
from compile_ext.passes.parameter_math import LazyParameterMath
from compile_ext.passes.readers import is_view, read_cast
from compile_ext.passes.values import tensor


@dataclass(frozen=True)
class Operands:
    """``a [..., k]``, ``b [n, k]`` and ``bias``; ``note`` says what became of float32."""

    a: Node
    b: Node
    bias: Node | None
    note: str = ""


def operands_of(linear: Linear, before: Node, ctx: PassContext) -> Operands:
    """New nodes stand in front of ``before``."""
    b, note = _without_idle_cast(linear.weight), ""
    if ctx.bf16_router and _dtype(b) == torch.float32:
        b, note = _weight_in_bfloat16(b, before, ctx)
    a = _without_cast(_without_idle_cast(linear.x), before, ctx)
    if _dtype(a) == torch.float32 and _dtype(b) == torch.bfloat16:
        a, note = ctx.insert(before, "to", a, torch.bfloat16), f"{note}, x rounded to it"
    if linear.layout == "nn":
        b = ctx.insert(before, "t", b)
    return Operands(a, b, linear.bias, note)


def exact_source(x: Node, ctx: PassContext) -> Node | None:
    """The bfloat16 tensor of which a float32 one is a copy, behind views, in the graph or as a
    derived constant. None where it is none, or where the graph writes either, and they may part.
    """
    base = _base(x)
    source = _converted_from(base, ctx)
    if source is None or _dtype(source) != torch.bfloat16:
        return None
    return None if ctx.is_written(source) or ctx.is_written(base) else source


def _without_idle_cast(x: Node) -> Node:
    """``w.float()`` of a float32 tensor is that tensor."""
    while read_cast(x) is not None and isinstance(x.args[0], Node):
        if _dtype(x.args[0]) != _dtype(x):
            break
        x = x.args[0]
    return x


def _base(x: Node) -> Node:
    while is_view(x) and isinstance(x.args[0], Node):
        x = x.args[0]
    return x


def _converted_from(base: Node, ctx: PassContext) -> Node | None:
    if base not in ctx.derived:
        source = base.args[0] if read_cast(base) == torch.float32 else None
        return source if isinstance(source, Node) else None
    sources, how = ctx.derived.origin(base)
    if not isinstance(how, Program) or len(sources) != 1:
        return None
    steps = [x for x in how.graph.nodes if x.op.startswith("call_")]
    return sources[0] if len(steps) == 1 and read_cast(steps[0]) == torch.float32 else None


def _without_cast(x: Node, before: Node, ctx: PassContext) -> Node:
    """``x`` as it was before the cast, under the same views."""
    source = exact_source(x, ctx)
    if source is None:
        return x
    base, views = _base(x), []
    while x is not base:
        views.append(x)
        x = x.args[0]  # type: ignore[assignment]
    for view in reversed(views):
        source = same_view(view, source, before, ctx)
    return source


def same_view(view: Node, of: Node, before: Node, ctx: PassContext) -> Node:
    """The view of another tensor of the same shape."""
    new = ctx.insert_bare(before, view.target, (of, *view.args[1:]), view.kwargs, view)
    ctx.update_fake(new)
    return new


def _weight_in_bfloat16(weight: Node, before: Node, ctx: PassContext) -> tuple[Node, str]:
    """The bfloat16 parameter that a weight was converted from, or a derived constant."""
    if exact_source(weight, ctx) is not None:
        return _without_cast(weight, before, ctx), "the weight as the bfloat16 that it was"
    cast = ctx.insert(before, "to", weight, torch.bfloat16)
    found = LazyParameterMath(before.graph, ctx).of_view(cast)
    reason: str | None = "it is not computed from parameters alone"
    if found is not None:
        result, reason = found
        sources, how = tuple(result.sources), result.derivation()
        if any(x in ctx.derived for x in sources):
            reason = "it is a derived constant"
        reason = reason or ctx.charge((sources, how))
        if reason is None:
            constant = ctx.derive(before.graph, sources, how)
            ctx.erase_dead([cast])
            return constant, "the weight rounded to bfloat16 once"
    ctx.erase_dead([cast])
    return weight, f"the weight stays float32: {reason}"


def _dtype(node: Node) -> torch.dtype | None:
    found = tensor(node)
    return None if found is None else found.dtype
