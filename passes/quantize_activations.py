"""Quantize a bfloat16 activation in the graph, where the op would do it inside.

    before: y = block_scaled_mm(x, w, None, scale, ...)    with x in bfloat16
    after:  q, s = quantize_fp8_groups(x); y = block_scaled_mm(q, w, s, scale, ...)

A quantization in the graph disappears into what computes x: ``fuse_norm_quantize`` makes one op of
it and an RMSNorm, Inductor one kernel of it and pointwise code. It is computed once for all GEMMs
that read x, and the op can choose kernels that take FP8 alone.
Legal: always, right before the GEMM. The op's own quantization is that of ``quantize_fp8_groups``,
bit for bit. GEMMs share one where nothing in the graph writes x.
Bails: what computes x is another kernel, and M so small that the GEMM quantizes x for nothing.
Looks at nothing where the op would run its reference, which is exact and slow either way.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_ext.ops import column_major
from compile_ext.ops.block_scaled_mm import OP as BLOCK_SCALED_MM
from compile_ext.ops.block_scaled_mm_spec import SMALL_M
from compile_ext.ops.checks import is_zero
from compile_ext.ops.define import PINNED, definition_of
from compile_ext.ops.quantize import BLOCK, quantize_groups
from compile_ext.ops.ue8m0 import E8M0
from compile_ext.passes.context import PassContext
from compile_ext.passes.inline import Inliner
from compile_ext.passes.norm_quantize.find import has_kernel as has_norm_kernel
from compile_ext.passes.norm_quantize.nodes import NodeExpressions
from compile_ext.passes.norm_quantize.patterns import Norm, read_norm
from compile_ext.passes.op_calls import OpCall, read_call
from compile_ext.passes.producers import before_reshapes, is_pointwise
from compile_ext.passes.values import bounds, fakes, is_static, range_text, tensor


def quantize_activations(graph: Graph, ctx: PassContext) -> None:
    calls = [call for node in graph.nodes if (call := _read(node, ctx)) is not None]
    if not calls:
        return
    producers = _Producers(calls, ctx)
    reasons = [ctx.stand_back(x.node) or _why_not(x.arguments["a"], producers) for x in calls]
    # As the op itself does: scales of powers of two where the weight has such.
    inliners = {x: Inliner(functools.partial(_quantize, use_ue8m0=x), ctx) for x in (False, True)}
    done: dict[tuple[Node, bool], tuple[Node, ...]] = {}
    for call, reason in zip(calls, reasons, strict=True):
        node, a = call.node, call.arguments["a"]
        ctx.entry(node, call.arguments["b"])
        if reason is not None:
            ctx.skipped(node, reason)
            continue
        scale_b = tensor(call.arguments["scale_b"])
        assert scale_b is not None
        key = producers.origin[node], scale_b.dtype == E8M0
        shared = None if ctx.is_written(a) else done.get(key)
        q, scale = done[key] = shared or inliners[key[1]].insert(a, node)
        ctx.rewrite(call, {"a": q, "scale_a": scale})
        alone = "its activation is quantized"
        ctx.fired(node, "it shares the quantization of its activation" if shared else alone)


def _quantize(x: Tensor, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    q, scale = quantize_groups(x, use_ue8m0)
    return q, column_major.OP(scale)


def _read(node: Node, ctx: PassContext) -> OpCall | None:
    """A call whose kernel would quantize the activation."""
    call = read_call(node)
    if call is None or call.op is not BLOCK_SCALED_MM:
        return None
    definition, a = definition_of(call.op), tensor(call.arguments["a"])
    assert definition is not None
    if a is None or a.dtype != torch.bfloat16:
        return None
    pinned = call.arguments[PINNED] or ctx.kernels.get(definition.name)
    args = definition.own_arguments(fakes(call.arguments))
    is_reference = definition.kernel_for(*args)[0].name == "reference"
    return None if is_reference or pinned == "reference" else call


def _why_not(a: Node, producers: _Producers) -> str | None:
    found = tensor(a)
    assert found is not None
    m, k = found.shape
    if not is_static(k):
        return "its last dimension is symbolic"
    if is_zero(m) or is_zero(k):
        return "its activation is empty"
    if _pays_alone(m) or producers.fuses(a):
        return None
    few = range_text(*bounds(m))
    return f"M is {few}: the kernel quantizes {a.name} on its way, and another one computes it"


def _pays_alone(m: int | torch.SymInt) -> bool:
    """Whether to quantize in a kernel of its own, which fuses into nothing.

    Up to SMALL_M tokens the GEMM waits for its weight, and quantizes meanwhile. Above, a tile
    quantizes the activation again for each block of columns, and DeepGEMM takes FP8 alone. One
    graph for few and many tokens does what many want: nothing here depends on M at run time.
    """
    _, high = bounds(m)
    return high is None or high > SMALL_M


class _Producers:
    """What computes the activations of these calls; ``origin``: of each call, before reshapes."""

    def __init__(self, calls: list[OpCall], ctx: PassContext) -> None:
        self._ctx = ctx
        self._calls = {call.node: call for call in calls}
        self.origin = {call.node: before_reshapes(call.arguments["a"], ctx) for call in calls}
        self._exprs = NodeExpressions(ctx.scopes)

    def fuses(self, a: Node) -> bool:
        """Whether the quantization of ``a [m, k]`` fuses into what computes it."""
        x = tensor(a)
        assert x is not None
        # A partial group is quantized by an index (``ops/quantize.py``), for which Inductor stores
        # the scale first.
        in_pointwise = x.shape[1] % BLOCK == 0 and is_pointwise(a, self._ctx)
        return in_pointwise or self._is_fusing_norm(a, x)

    def _is_fusing_norm(self, a: Node, y: Tensor) -> bool:
        """``fuse_norm_quantize`` takes an RMSNorm that nothing else reads."""
        if not has_norm_kernel(y) or not isinstance(read_norm(self._exprs.of(a), y.dtype), Norm):
            return False
        todo = [before_reshapes(a, self._ctx)]
        while todo:
            for user in todo.pop().users:
                if user in self._calls or self._is_placeholder(user):
                    continue
                if before_reshapes(user, self._ctx) is user:
                    return False
                todo.append(user)
        return True

    def _is_placeholder(self, node: Node) -> bool:
        """A scale like ``y.new_ones(1)``, which goes when the calls get another."""
        taken = [c.arguments["scale_a"] for c in map(self._calls.get, node.users) if c is not None]
        return len(taken) == len(node.users) and all(x is node for x in taken)
