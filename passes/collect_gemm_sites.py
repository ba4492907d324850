"""Record every GEMM with a contract: the op, N, K, the range of M, dtypes, scales, and the kernel
that runs.

The graph is unchanged. Runs after the other passes, on cache hits too: passes run on the Dynamo
graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from compile_ext.ops.contract import Gemm, m_of_gemm
from compile_ext.ops.define import PINNED, definition_of, own_arguments
from compile_ext.ops.registry import why_no_contract
from compile_ext.passes.context import PassContext
from compile_ext.passes.kernels_by_m import kernels_by_m
from compile_ext.passes.op_calls import OpCall, overload, read_call
from compile_ext.passes.regions import TRANSFORM
from compile_ext.passes.report import Site
from compile_ext.passes.values import bounds, dtype_name, fakes, is_static, tensor


def collect_gemm_sites(graph: Graph, ctx: PassContext) -> None:
    for node in graph.nodes:
        call = read_call(node)
        op = overload(node)
        misfit = why_no_contract(op) if op is not None else None
        if misfit:
            ctx.skipped(node, misfit)
        if call is None or ctx.stand_back(node) == TRANSFORM:
            continue
        if call.contract.gemm is not None:
            site = _site(call, call.contract.gemm)
            if site is not None:
                ctx.entry(node, call.arguments[call.contract.gemm.b]).site = site


def _site(call: OpCall, gemm: Gemm) -> Site | None:
    a, b = tensor(call.arguments[gemm.a]), tensor(call.arguments[gemm.b])
    out = next((x for x in map(tensor, _outputs(call)) if x is not None), None)
    if a is None or b is None or b.dim() < 2:
        return None
    m = m_of_gemm(call.op, gemm, a)
    kernel, passed_over = _kernel(call, m)
    n, k = b.shape[-2:] if gemm.layout == "nt" else b.shape[-2:][::-1]
    return Site(
        op=call.op._schema.name,
        m=bounds(m),
        n=_size(n),
        k=_size(k),
        a_dtype=dtype_name(a),
        b_dtype=dtype_name(b),
        out_dtype=dtype_name(out) if out is not None else "-",
        scales=(_shape(call, gemm.scale_a), _shape(call, gemm.scale_b)),
        bias=gemm.bias is not None and call.arguments[gemm.bias] is not None,
        kernel=kernel,
        passed_over=passed_over,
    )


def _outputs(call: OpCall) -> list[Any]:
    """What holds the result: the node, or the buffer that the op writes."""
    return [call.node, *(call.arguments[name] for name in call.contract.overwritten)]


def _kernel(call: OpCall, m: int | torch.SymInt) -> tuple[str, tuple[str, ...]]:
    definition = definition_of(call.op)
    if definition is None:
        return "-", ()
    pinned = call.arguments[PINNED]
    args = own_arguments(fakes(call.arguments))
    kernel, reasons = definition.kernel_for(*args, pinned=pinned)
    name = kernel.name
    if pinned is None and isinstance(m, torch.SymInt) and not is_static(m):
        name = kernels_by_m(definition, args, m, otherwise=name)
    names: dict[str, list[str]] = {}  # one line for all that say the same
    for other, reason in reasons.items():
        names.setdefault(reason, []).append(other)
    return name, tuple(f"{', '.join(same)}: {reason}" for reason, same in names.items())


def _size(size: int | torch.SymInt) -> int | str:
    return int(size) if is_static(size) else str(size)


def _shape(call: OpCall, name: str | None) -> str:
    found = tensor(call.arguments[name]) if name else None
    # Only M is symbolic in a scale; Dynamo's own name for it differs from compilation to
    # compilation.
    return (
        "-"
        if found is None
        else "x".join(str(s) if is_static(s) else "m" for s in found.shape) or "1"
    )
