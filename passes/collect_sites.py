"""Record every call of an op of this package, and of every other op with a contract: what a warmup
makes again, and for a GEMM what ``explain`` shows: N, K, the range of M, dtypes, scales, and the
kernel that runs. Calls of other packages' ops that it cannot tell of are recorded with the reason.

The graph is unchanged. Runs after the other passes, on cache hits too: passes run on the Dynamo
graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Graph, Node

from compile_ext.ops.contract import Gemm, m_of_gemm
from compile_ext.ops.define import PINNED, definition_of, own_arguments
from compile_ext.ops.registry import contract_of, why_no_contract
from compile_ext.passes.call_site import NotExpressible, call_site
from compile_ext.passes.context import PassContext
from compile_ext.passes.kernels_by_m import kernels_by_m
from compile_ext.passes.op_calls import FUNCTIONALIZED, OpCall, overload, read_call
from compile_ext.passes.regions import TRANSFORM
from compile_ext.passes.report import Site
from compile_ext.passes.values import bounds, dtype_name, fakes, is_static, tensor

# Namespaces of torch's own: what these ops compile, if anything, is Inductor's or the compiler's of
# torch itself.
_TORCH = (
    *("aten", "prim", "prims", "inductor", "rngprims", "profiler", "quantized", "mkl", "mkldnn"),
    *("onednn", "_quantized", "quantized_decomposed", "c10d", "_c10d_functional", "symm_mem"),
)
_NO_CONTRACT = "it has no contract: compile_ext.register_contract(op, OpContract(...))"
_SAYS_NOT = "its contract does not say what it compiles: OpContract(compile_units=...)"


def collect_sites(graph: Graph, ctx: PassContext) -> None:
    for node in graph.nodes:
        call = read_call(node)
        op = _op(node)
        misfit = why_no_contract(op) if op is not None else None
        if misfit:
            ctx.skipped(node, misfit)
        if op is None:
            continue
        if call is None or ctx.stand_back(node) == TRANSFORM:
            reason = _why_unread(op, misfit, ctx.stand_back(node))
            if reason is not None:
                ctx.entry(node).not_covered = reason
            continue
        gemm = call.contract.gemm
        entry = ctx.entry(node, call.arguments[gemm.b] if gemm is not None else None)
        if gemm is not None:
            entry.site = _site(call, gemm)
        if definition_of(op) is None and call.contract.compile_units is None:
            entry.not_covered = _SAYS_NOT
        try:
            entry.call = call_site(call)
        except NotExpressible as error:
            entry.not_covered = str(error)


def _op(node: Node) -> OpOverload | None:
    """What a node calls, also through ``auto_functionalized``."""
    if node.op != "call_function" or node._erased:
        return None
    if node.target in FUNCTIONALIZED:
        op = node.args[0]
        return op if isinstance(op, OpOverload) else None
    packet: Any = node.target
    if isinstance(packet, OpOverloadPacket) and not _is_of_torch(packet._qualified_op_name):
        # Which overload is looked up for those with a contract: any will do to name the others.
        return overload(node) or getattr(packet, packet.overloads()[0])
    return overload(node)


def _is_of_torch(name: str) -> bool:
    return name.split("::")[0] in _TORCH


def _why_unread(op: OpOverload, misfit: str | None, stand_back: str | None) -> str | None:
    """Why nothing is known of a call; None of an op that is torch's."""
    if stand_back == TRANSFORM and contract_of(op) is not None:
        return TRANSFORM
    if _is_of_torch(op._schema.name):
        return None
    if contract_of(op) is not None:
        return "its arguments are views of what it writes"
    return misfit or _NO_CONTRACT


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
