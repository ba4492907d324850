"""For one token, give a norm and the router that reads it one op, and their choice of experts too.

    before: y = rms_norm(x, w, ...); logits = router_gemm_m1(y, b, bias)
    after:  y, _, logits = rms_norm_router(x, None, w, ..., b, bias)

    before: y, sum = add_rms_norm(x, h, w, ...); logits = router_gemm_m1(y, b, bias)
            weights, ids = router_topk(logits, c, ...)
    after:  y, sum, weights, ids = rms_norm_router_topk(x, h, w, ..., b, bias, c, ...)

One launch in the place of two or three. The op stands where the norm stood.
Legal: y reaches the router as it is, but for its shape; b, bias and c are there where the norm is,
and the graph writes neither them nor y. The logits are those of the norm before it is rounded:
closer to exact, by up to 2^-8 of the magnitudes in bfloat16. The choice goes along where nothing
else reads the logits, and compile_ext.kernels names a kernel that makes it in the same launch: the
one that there is was measured as slower.
Bails: b, bias or c is computed behind the norm, or written; a kernel is named for one of the ops;
compile_ext.batch_invariant; the op would run its reference; autocast, a gradient.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, Node

from compile_ext.ops.add_rms_norm import OP as ADD_RMS_NORM
from compile_ext.ops.define import PINNED, definition_of, own_arguments, why_reference
from compile_ext.ops.rms_norm import OP as RMS_NORM
from compile_ext.ops.rms_norm_router import OP as RMS_NORM_ROUTER
from compile_ext.ops.rms_norm_router_topk import OP as RMS_NORM_ROUTER_TOPK
from compile_ext.ops.router_gemm_m1 import OP as ROUTER_GEMM_M1
from compile_ext.ops.router_topk import OP as ROUTER_TOPK
from compile_ext.passes.context import PassContext
from compile_ext.passes.expressions.forms import same_shape
from compile_ext.passes.op_calls import OpCall, read_call
from compile_ext.passes.values import fakes, tensor
from compile_ext.passes.views import before_reshapes, is_written_through

_Y, _SUM, _LOGITS = range(3)  # results of rms_norm_router
_WEIGHTS, _IDS = 2, 3  # results of rms_norm_router_topk, behind y and the sum


@dataclass(frozen=True)
class Fusion:
    """A call that makes the results of others.

    Args:
        op, arguments: the call.
        calls: those whose place it takes, in order: norm, router and perhaps choice.
        results: of each node that holds a result, which result of the call that is.
    """

    op: OpOverload
    arguments: tuple[Any, ...]
    calls: tuple[OpCall, ...]
    results: dict[Node, int]

    def __str__(self) -> str:
        residual = "residual, " if self.arguments[1] is not None else ""
        parts = "norm, router and choice" if len(self.calls) == 3 else "norm and router"
        return f"{residual}{parts} in one launch"


def fuse_router(graph: Graph, ctx: PassContext) -> None:
    for node in list(graph.nodes):
        router = read_call(node)
        if router is None or router.op is not ROUTER_GEMM_M1:
            continue
        found = _norm_before(router, ctx)
        if found is None:
            continue
        norm, y = found
        fusions = _fusions(norm, router)
        reasons = [_why_not(fusion, y, ctx) for fusion in fusions]
        if None in reasons:
            _place(fusions[reasons.index(None)], ctx)
        else:
            ctx.skipped(node, str(reasons[-1]))


def _norm_before(router: OpCall, ctx: PassContext) -> tuple[OpCall, Node] | None:
    """The norm whose result a router reads, and the node of that result."""
    y = before_reshapes(router.arguments["a"], ctx)
    call = read_call(y)
    if call is not None and call.op is RMS_NORM:
        return call, y
    if y.target is not operator.getitem or y.args[1] != _Y:
        return None
    call = read_call(y.args[0])  # type: ignore[arg-type]
    return (call, y) if call is not None and call.op is ADD_RMS_NORM else None


def _fusions(norm: OpCall, router: OpCall) -> list[Fusion]:
    """What the two may become, the most first."""
    given = norm.arguments
    arguments = (
        *(given["x"], given.get("residual"), given["weight"]),
        *(given["eps"], given["round_before_weight"]),
        *(router.arguments["b"], router.arguments["bias"]),
    )
    results = {norm.node: _Y} if norm.op is RMS_NORM else _parts(norm, _Y)
    two = Fusion(RMS_NORM_ROUTER, arguments, (norm, router), {**results, router.node: _LOGITS})
    choice = read_call(next(iter(router.node.users))) if len(router.node.users) == 1 else None
    if choice is None or choice.op is not ROUTER_TOPK:
        return [two]
    definition = definition_of(ROUTER_TOPK)
    assert definition is not None
    more = own_arguments(choice.arguments)[1:]
    three = Fusion(
        RMS_NORM_ROUTER_TOPK,
        (*arguments, *more),
        (norm, router, choice),
        {**results, **_parts(choice, _WEIGHTS)},
    )
    return [three, two]


def _parts(call: OpCall, first: int) -> dict[Node, int]:
    """The nodes that take one of a call's results; ``first`` is the number of the first."""
    return {x: first + int(x.args[1]) for x in call.node.users}  # type: ignore[arg-type]


def _why_not(fusion: Fusion, y: Node, ctx: PassContext) -> str | None:
    norm = fusion.calls[0]
    for call in fusion.calls:
        reason = ctx.stand_back(call.node) or _why_kept(call, ctx)
        if reason is not None:
            return reason
        for name in call.contract.prewait_reads if call is not norm else ():
            value = call.arguments[name]
            if not isinstance(value, Node):
                continue
            if ctx.is_written(value):
                return f"the graph writes {name}"
            if value.op != "placeholder" and not value < norm.node:
                return f"{name} is computed behind the norm"
    if is_written_through(y, ctx):
        return "the graph writes the normed activation"
    definition = definition_of(fusion.op)
    assert definition is not None
    named = ctx.kernels.get(definition.name)
    return why_reference(fusion.op, *fakes(fusion.arguments), pinned=named)


def _why_kept(call: OpCall, ctx: PassContext) -> str | None:
    """Why a call must stay the op that it is."""
    if ctx.batch_invariant:
        return "compile_ext.batch_invariant wants one op for every M"
    definition = definition_of(call.op)
    assert definition is not None
    if call.arguments[PINNED]:
        return f"the call of {definition.name} names {call.arguments[PINNED]}"
    named = [name for name in (definition.name, definition.family) if name in ctx.kernels]
    return f"compile_ext.kernels names a kernel of {named[0]}" if named else None


def _place(fusion: Fusion, ctx: PassContext) -> None:
    norm, router = fusion.calls[:2]
    call = ctx.insert(norm.node, fusion.op, *fusion.arguments, like=router.node)
    placed = [(old, _result(call, i, old, norm.node, ctx)) for old, i in fusion.results.items()]
    ctx.report.moved(router.node, call)
    ctx.fired(call, str(fusion))
    for old, new in placed:
        ctx.replace(old, new)
    ctx.erase_dead(x.node for x in fusion.calls)


def _result(call: Node, number: int, old: Node, before: Node, ctx: PassContext) -> Node:
    """A result of the call in the shape of the node whose place it takes: one token's is known."""
    new = ctx.insert(before, operator.getitem, call, number, like=old)
    want, have = tensor(old), tensor(new)
    assert want is not None
    assert have is not None
    if same_shape(want, have):
        return new
    return ctx.insert(before, "view", new, *map(int, want.shape), like=old)
