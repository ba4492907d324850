"""Give a kernel weights whose address and strides it can take.

A weight that is a slice of a fused one begins anywhere, and its rows are further apart than they
are long. Where a contract's ``memory`` forbids that, the op gets a derived constant that fits. What
address a weight has differs between the layers that one graph serves: where a contract asks for
one, each weight goes through a derived constant, which is the weight itself if it fits.
"""

from __future__ import annotations

from torch.fx import Node

from compile_ext.ops.contract import Memory
from compile_ext.passes.context import PassContext
from compile_ext.passes.derivation import Restride
from compile_ext.passes.op_calls import OpCall
from compile_ext.passes.parameter_math import LazyParameterMath
from compile_ext.passes.values import is_static, tensor


def fit_memory(call: OpCall, ctx: PassContext, math: LazyParameterMath) -> None:
    """Weights, scales and biases of a call, as its contract's ``memory`` wants them."""
    for name, memory in call.contract.memory.items():
        value = call.arguments[name]
        if isinstance(value, Node) and not ctx.is_activation(value):
            _fit(call, name, value, memory, ctx, math)


def _fit(
    call: OpCall,
    name: str,
    value: Node,
    memory: Memory,
    ctx: PassContext,
    math: LazyParameterMath,
) -> None:
    want = Restride(memory.stride, memory.address)
    what = _misfit(value, want, ctx)
    if what is None:
        return
    computed = math.of_view(value)
    if computed is None:
        ctx.skipped(call.node, f"{name}: {what}, and it is computed in the graph")
        return
    found, reason = computed
    how, sources = found.derivation(want), tuple(found.sources)
    if len(sources) > 1 and any(x in ctx.derived for x in sources):
        reason = reason or "it is computed from constants"
    reason = ctx.stand_back(call.node) or reason or ctx.charge((sources, how))
    if reason:
        ctx.skipped(call.node, f"{name}: {what}, and {reason}")
        return
    ctx.rewrite(call, {name: ctx.derive(call.node.graph, sources, how)})
    ctx.fired(call.node, f"{name}: {what}: {want}")


def _misfit(value: Node, want: Restride, ctx: PassContext) -> str | None:
    found = tensor(value)
    if found is None or not all(map(is_static, (*found.shape, *found.stride()))):
        return None
    if not want.fits_strides(found):
        return f"its strides are {tuple(map(int, found.stride()))}"
    # A constant is an allocation of its own, whose address fits.
    return "its address may be any" if want.address > 1 and value not in ctx.derived else None
