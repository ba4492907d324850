"""Give a kernel weights whose address and strides it can take.

A weight that is a slice of a fused one begins anywhere, and its rows are further apart than they
are long. Where a contract's ``memory`` forbids that, the op gets a derived constant that fits.
"""

from __future__ import annotations

from torch.fx import Node

from compile_ext.ops.contract import Memory
from compile_ext.passes.context import PassContext
from compile_ext.passes.derivation import Restride
from compile_ext.passes.parameter_math import LazyParameterMath
from compile_ext.passes.readers import read_call
from compile_ext.passes.values import is_static, tensor


def fit_memory(node: Node, ctx: PassContext, math: LazyParameterMath) -> None:
    call = read_call(node)
    assert call is not None  # the alignment kept the op
    for name, memory in call.contract.memory.items():
        value = call.arguments[name]
        if not isinstance(value, Node) or ctx.is_activation(value):
            continue
        misfit = _misfit(value, memory, ctx)
        if misfit is None:
            continue
        computed = math.of_view(value)
        if computed is None:
            ctx.skipped(node, f"{name}: {misfit}, and it is computed in the graph")
            continue
        found, reason = computed
        how, sources = found.derivation(Restride(memory.stride)), tuple(found.sources)
        if len(sources) > 1 and any(x in ctx.derived for x in sources):
            reason = reason or "it is computed from constants"
        reason = ctx.stand_back(node) or reason or ctx.why_no_memory((sources, how))
        if reason:
            ctx.skipped(node, f"{name}: {misfit}, and {reason}")
            continue
        ctx.rewrite(call, {name: ctx.derive(sources, how)})
        ctx.fired(node, f"{name}: {misfit}: copied")


def _misfit(value: Node, memory: Memory, ctx: PassContext) -> str | None:
    found = tensor(value)
    if found is None or not all(map(is_static, (*found.shape, *found.stride()))):
        return None
    strides = [st for st, size in zip(found.stride(), found.shape, strict=True) if size > 1]
    for stride in strides:
        if stride != 1 and stride % memory.stride:
            return f"stride {stride} is no multiple of {memory.stride}"
    start = ctx.address(value)
    if start is not None and start % memory.address:
        return f"its address is no multiple of {memory.address}"
    return None
