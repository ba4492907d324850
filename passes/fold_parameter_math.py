"""Compute what depends on parameters alone once, and not on each call.

    before: y = op(x, w.t().contiguous(), 1 / scale)        after: y = op(x, w', scale')
    before: y = F.linear(x, torch.cat([q, k, v]))           after: y = F.linear(x, qkv')

w', scale', ... are extra inputs that hold derived constants (``compile_ext.derived``). Views stay
in the graph: they cost nothing.
Legal: pure ATen ops on parameters and buffers; nothing in the graph writes the parameters, or the
result beyond the writes that build it; no gradient is needed.
Bails: the result is larger than the memory budget has left. Results are taken smallest first.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.derivation import Derivation
from compile_ext.passes.parameter_math import ParameterMath, Result, put_constants
from compile_ext.passes.values import tensor


def fold_parameter_math(graph: Graph, ctx: PassContext) -> None:
    math = ParameterMath(graph, ctx)
    folded: list[tuple[Result, Derivation]] = []
    for result in sorted(math.results(), key=lambda r: r.nbytes):
        ctx.entry(result.node, result.sources[0])
        how = result.derivation()
        reason = _why_not(result, math, ctx) or ctx.charge((tuple(result.sources), how))
        if reason:
            ctx.skipped(result.node, reason)
        else:
            ctx.fired(result.node, f"{how} of {_what(result)} is a derived constant")
            folded.append((result, how))
    put_constants(folded, ctx)


def _why_not(result: Result, math: ParameterMath, ctx: PassContext) -> str | None:
    reason = result.why_not_derivable(ctx) or math.why_not(result)
    if reason:
        return reason
    if ctx.is_leaving(result.node):
        return "the graph hands the result out"
    if _devices(result.node) != _devices(*result.sources):
        return "it moves to another device"
    return None


def _devices(*nodes: Node) -> set[torch.device]:
    return {found.device for x in nodes if (found := tensor(x)) is not None}


def _what(result: Result) -> str:
    return "a parameter" if len(result.sources) == 1 else f"{len(result.sources)} parameters"
