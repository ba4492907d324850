"""Give a GEMM the alignment that its contract asks for, with nothing left to pad per call.

    before: y = op(x, w, scale, bias)    with N or K not a multiple that the contract asks for
    after:  y = op(pad_k(x), w', scale', bias')[:, :N]    w', ... are extra inputs

w', scale', bias' are derived constants (``compile_ext.derived``); the activation is padded where it
is computed (``padding/pad_activation.py``), the output is a view where no reader can tell, else a
copy (``padding/cut_output.py``). A weight whose address or strides break the contract becomes a
copy that fits (``padding/fit_memory.py``).
Legal: the weight is computed from parameters and buffers alone, nothing in the graph writes them,
and no gradient is needed.
Bails: an activation weight, a symbolic N or K, an argument whose padded axis is ambiguous.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch.fx import Graph, Node

from compile_ext.ops.contract import Gemm
from compile_ext.passes.context import PassContext
from compile_ext.passes.derivation import Derivation
from compile_ext.passes.derived_inputs import Sources
from compile_ext.passes.op_calls import OpCall, read_call
from compile_ext.passes.padding.alignment import Widths, argument_widths, growth, padding_of
from compile_ext.passes.padding.cut_output import cut_output
from compile_ext.passes.padding.fit_memory import fit_memory
from compile_ext.passes.padding.pad_activation import pad_activation
from compile_ext.passes.parameter_math import LazyParameterMath
from compile_ext.passes.readers import read_transpose


def fold_weight_padding(graph: Graph, ctx: PassContext) -> None:
    math = LazyParameterMath(graph, ctx)
    for node in list(graph.nodes):
        call = read_call(node)
        if call is None or call.contract.gemm is None:
            continue
        if call.contract.align:
            _fold_alignment(call, call.contract.gemm, ctx, math)
        call = read_call(node)
        if call is not None:
            fit_memory(call, ctx, math)


def _fold_alignment(call: OpCall, gemm: Gemm, ctx: PassContext, math: LazyParameterMath) -> None:
    node = call.node
    ctx.entry(node, call.arguments[gemm.b])
    found = growth(call, gemm)
    if isinstance(found, str):
        ctx.skipped(node, found)
        return
    sizes, grow = found
    if not any(grow.values()):
        ctx.skipped(node, f"N={sizes['n']}, K={sizes['k']} need no padding")
        return
    if grow.get("n") and call.is_functional:
        ctx.skipped(node, "its output is one of several: it cannot be cut")
        return
    widths = argument_widths(call, gemm, sizes, grow)
    reason = ctx.stand_back(node) or (widths if isinstance(widths, str) else None)
    if reason or isinstance(widths, str):
        ctx.skipped(node, str(reason))
        return
    padded = {x: _Padded(call.arguments[x], w, ctx, math) for x, w in widths.items() if x != gemm.a}
    reason = padded[gemm.b].reason
    reason = reason or ctx.charge(*[p.constant for p in padded.values() if p.constant])
    if reason:
        ctx.skipped(node, reason)
        return
    changes: dict[str, Node] = {}
    unread: list[Node] = []
    if gemm.a in widths:
        extra, value = next(iter(widths[gemm.a].values()))
        changes[gemm.a], unread = pad_activation(call.arguments[gemm.a], extra, value, ctx)
        call = read_call(node) or call  # the scale that comes with it may be a new node
    changes |= {x: p.insert(node) for x, p in padded.items()}
    ctx.rewrite(call, changes)
    ctx.update_fake(node)
    ctx.erase_dead(unread)
    what = ", ".join(f"{d.upper()} {sizes[d]} -> {sizes[d] + g}" for d, g in grow.items() if g)
    ctx.fired(node, f"{what}: {', '.join(sorted(changes))} padded")
    if grow.get("n"):
        cut_output(node, int(sizes["n"]), ctx)


class _Padded:
    """One argument grown by ``widths``: a derived constant where it can be one, else padded in the
    graph, for the ``reason``."""

    def __init__(
        self, value: Node, widths: Widths, ctx: PassContext, math: LazyParameterMath
    ) -> None:
        self._ctx = ctx
        # A weight that is stored [n, k] and handed over as its transposed view stays that.
        source = read_transpose(value)
        self._is_transposed = source is not None
        self._source = source or value
        self._padding = padding_of(self._source, widths, self._is_transposed)
        self.reason = ctx.why_not_derivable(self._source)
        self.constant: tuple[Sources, Derivation] | None = None
        if self.reason is None:
            self.constant = (self._source,), self._padding
        if self.reason and not ctx.is_activation(self._source):
            self._derive_from_views(math)

    def _derive_from_views(self, math: LazyParameterMath) -> None:
        computed = math.of_view(self._source)
        if computed is None or any(x in self._ctx.derived for x in computed[0].sources):
            return
        found, self.reason = computed
        if self.reason is None:
            self.constant = tuple(found.sources), found.derivation(self._padding)

    def insert(self, before: Node) -> Node:
        if self.constant is not None:
            made = self._ctx.derive(before.graph, *self.constant)
        else:
            pad, value = [*self._padding.pad], self._padding.value
            made = self._ctx.insert(before, F.pad, self._source, pad, value=value)
        return self._ctx.insert(before, "t", made) if self._is_transposed else made
