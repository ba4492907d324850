"""Quantize a bfloat16 activation in the graph, where the op would do it inside.

    before: y = block_scaled_mm(x, w, None, scale, ...)    with x in bfloat16
    after:  q, s = quantize_fp8_groups(x); y = block_scaled_mm(q, w, s, scale, ...)

A quantization in the graph disappears into what computes x: ``fuse_norm_quantize`` makes one op of
it and an RMSNorm, Inductor one kernel of it and pointwise code. It is computed once for all GEMMs
that read x, and the op can choose kernels that take FP8 alone.
Legal: always, right before the GEMM. The op's own quantization is that of ``quantize_fp8_groups``,
bit for bit. GEMMs share one where nothing in the graph writes x.
Also where another kernel computes x, and the quantization becomes one of its own, of about 2 us:
inside, each program quantizes all of its rows again. M = 1, N = 576, K = 7168: 3 us in FP8, 42 us
in bfloat16 (H200, DeepGEMM takes none). So `block_scaled_mm_small_m.py` takes FP8 alone as well.
Bails: an empty activation, or one whose K is symbolic; the reference is pinned; autocast, a
gradient, a transform.
Looks at nothing where the op would run its reference, which is exact and slow either way.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_ext.ops import column_major
from compile_ext.ops.block_scaled_mm import OP as BLOCK_SCALED_MM
from compile_ext.ops.block_scaled_mm_m1 import OP as BLOCK_SCALED_MM_M1
from compile_ext.ops.checks import is_zero
from compile_ext.ops.define import PINNED, definition_of, own_arguments, why_reference
from compile_ext.ops.quantize import quantize_groups
from compile_ext.ops.ue8m0 import E8M0
from compile_ext.passes.context import PassContext
from compile_ext.passes.inline import Inliner
from compile_ext.passes.op_calls import OpCall, read_call
from compile_ext.passes.values import fakes, is_static, tensor
from compile_ext.passes.views import before_reshapes


def quantize_activations(graph: Graph, ctx: PassContext) -> None:
    calls = [call for node in graph.nodes if (call := _read(node, ctx)) is not None]
    if not calls:
        return
    origins = [before_reshapes(x.arguments["a"], ctx) for x in calls]
    reasons = [ctx.stand_back(x.node) or _why_not(x.arguments["a"]) for x in calls]
    # As the op itself does: scales of powers of two where the weight has such.
    inliners = {x: Inliner(functools.partial(_quantize, use_ue8m0=x), ctx) for x in (False, True)}
    done: dict[tuple[Node, int, bool], tuple[Node, ...]] = {}
    for call, origin, reason in zip(calls, origins, reasons, strict=True):
        node, a = call.node, call.arguments["a"]
        ctx.entry(node, call.arguments["b"])
        if reason is not None:
            ctx.skipped(node, reason)
            continue
        found, scale_b = tensor(a), tensor(call.arguments["scale_b"])
        assert found is not None
        assert scale_b is not None
        key = origin, int(found.shape[1]), scale_b.dtype == E8M0
        shared = None if ctx.is_written(a) else done.get(key)
        q, scale = done[key] = shared or inliners[key[2]].insert(a, node)
        ctx.rewrite(call, {"a": q, "scale_a": scale})
        what = "it shares the quantization of its activation"
        ctx.fired(node, what if shared else "its activation is quantized")


def _quantize(x: Tensor, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    q, scale = quantize_groups(x, use_ue8m0)
    return q, column_major.OP(scale)


def _read(node: Node, ctx: PassContext) -> OpCall | None:
    """A call whose kernel would quantize the activation."""
    call = read_call(node)
    if call is None or call.op not in (BLOCK_SCALED_MM, BLOCK_SCALED_MM_M1):
        return None
    definition, a = definition_of(call.op), tensor(call.arguments["a"])
    assert definition is not None
    if a is None or a.dtype != torch.bfloat16:
        return None
    pinned = call.arguments[PINNED] or ctx.kernels.get(definition.family)
    args = own_arguments(fakes(call.arguments))
    is_reference = pinned == "reference" or why_reference(call.op, *args) is not None
    return None if is_reference else call


def _why_not(a: Node) -> str | None:
    found = tensor(a)
    assert found is not None
    m, k = found.shape
    if not is_static(k):
        return "its last dimension is symbolic"
    return "its activation is empty" if is_zero(m) or is_zero(k) else None
