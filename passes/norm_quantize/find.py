"""Find the norms with a 1x128 quantization behind them, and say how near ones differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Graph, Node

from compile_ext.ops.define import why_reference
from compile_ext.ops.rms_norm_quantize_fp8 import OP as RMS_NORM_QUANTIZE
from compile_ext.passes.expressions.expression import Expr
from compile_ext.passes.expressions.forms import LOW
from compile_ext.passes.expressions.nodes import NodeExpressions
from compile_ext.passes.norm_quantize.patterns import is_norm_and_quantization, read_quantization
from compile_ext.passes.norms.patterns import read_norm
from compile_ext.passes.norms.region import Region, find_region, why_unfit
from compile_ext.passes.values import is_static, tensor


def find_candidates(graph: Graph, exprs: NodeExpressions) -> Iterator[tuple[Node, Region | str]]:
    """The first cast to float8 of each normed activation, with the region of all of them, or the
    reason why it is none. Where the op would run its reference, nothing is looked at: to read the
    graph takes 20 ms, a third of all passes (the demo's decoder)."""
    groups: dict[Expr, list[Node]] = {}
    for node in [x for x in graph.nodes if _casts_to_float8(x) and _has_kernel(x)]:
        q = exprs.of(node)
        if is_norm_and_quantization(q):
            groups.setdefault(q, []).append(node)
    for casts in groups.values():
        yield casts[0], _read(casts, exprs)


def _casts_to_float8(node: Node) -> bool:
    out = tensor(node)
    if out is None or out.dtype != torch.float8_e4m3fn or not node.op.startswith("call_"):
        return False
    inputs = [x.dtype for x in map(tensor, node.all_input_nodes) if x is not None]
    return len(inputs) == 1 and inputs[0] in (torch.float32, *LOW.values())


def _has_kernel(cast: Node) -> bool:
    """Whether a device has a kernel for the op; what it would be called with is not known yet."""
    return why_reference(RMS_NORM_QUANTIZE, tensor(cast), None, 0.0, False, False) is None


def _read(casts: Sequence[Node], exprs: NodeExpressions) -> Region | str:
    out = tensor(casts[0])
    assert out is not None
    if not is_static(out.shape[-1]):
        return "its last dimension is symbolic"
    q = exprs.of(casts[0])
    quantization = read_quantization(q, int(out.shape[-1]))
    if isinstance(quantization, str):
        return f"not the quantization of quantize_fp8_groups: {quantization}"
    norm = read_norm(quantization.y)
    if isinstance(norm, str):
        return f"not an RMSNorm: {norm}"
    region = find_region(
        casts,
        exprs,
        norm,
        norm.inputs,
        kinds={q: torch.float8_e4m3fn, quantization.scale: torch.float32},
        parts={"norm": norm.y, "quantization": q},
        numbers=(*norm.numbers, *quantization.numbers),
    )
    return why_unfit(region, out) or region
