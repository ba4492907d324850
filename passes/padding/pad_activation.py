"""Pad K of an activation where it is computed, so that no kernel runs for the pad.

    before: s = amax(|x|) / 448; q = fp8(x / s); a = pad(q)
    after:  x' = pad(x); s = amax(pad(|x'|[:k])) / 448; a = pad(fp8(x' / s)[:k])

Inductor fuses a reduction with pointwise code of the same extents only. A pad behind a quantization
has other extents than the amax before it, and costs a kernel of its own; computed at the padded
extents from the start, everything is one kernel, and the pads are masks on its loads and stores.
Counted on an H200 for per-token quantization behind silu * mul, gelu and nothing: 2 kernels with
the GEMM, as for an aligned K; 3 with the pad behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.derivation import Padding
from compile_ext.passes.purity import aten_ops
from compile_ext.passes.values import is_static, same_size, tensor

aten = torch.ops.aten
# What padded elements must hold for the reduction not to see them.
_NEUTRAL = {aten.amax.default: float("-inf"), aten.sum.dim_IntList: 0.0, aten.mean.dim: 0.0}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_ELEMENTWISE = {aten._to_copy.default, aten.detach.default, aten.alias.default}


def pad_activation(a: Node, extra: int, value: float, ctx: PassContext) -> tuple[Node, list[Node]]:
    """``F.pad(a, (0, extra), value=value)`` of ``a [..., k]``, computed where ``a`` is.

    Also the nodes that this leaves without a reader, once ``a`` has none.
    """
    region = _Region(a, ctx)
    if any(ctx.is_written(x) for x in region.nodes()):
        return _pad(a, extra, value, ctx), []
    # Before it becomes float8, for which torch 2.11's C++ has no mask.
    x, casts = (a, []) if value else region.before_float8()
    # Without a reduction, pointwise code fuses with the pad as it is.
    make = region.widen if region.reductions else region.pad
    padded = make(x, extra, value)
    for cast in reversed(casts):
        padded = region.copy(cast, {cast.all_input_nodes[0]: padded}, extra)
    return padded, [*region.wide, *region.rows]


def _pad(x: Node, extra: int, value: float, ctx: PassContext) -> Node:
    found = tensor(x)
    if found is None or found.dtype not in _FLOAT8 or found.device.type != "cpu" or value:
        return ctx.insert(_behind(x), F.pad, x, [0, extra], value=value, like=x)
    # As bytes: torch 2.11's C++ has no mask for float8. 0.0 is the byte 0.
    as_bytes = ctx.insert(_behind(x), "view", x, torch.uint8, like=x)
    padded = ctx.insert(as_bytes.next, F.pad, as_bytes, [0, extra], value=0, like=x)
    return ctx.insert(padded.next, "view", padded, found.dtype, like=x)


def _behind(x: Node) -> Node:
    """The node to insert before, for what reads x."""
    at = x.next
    while at.op == "placeholder":
        at = at.next
    return at


class _Region:
    """The nodes between an activation and the tensors that it is computed from.

    ``wide`` nodes are ``[..., k]`` and pointwise; ``rows`` are ``[..., 1]``: reductions over k, and
    pointwise code on them.
    """

    def __init__(self, a: Node, ctx: PassContext) -> None:
        self._a, self._ctx = a, ctx
        found = tensor(a)
        assert found is not None
        self._k = int(found.shape[-1])
        self.wide: set[Node] = set()
        self.rows: set[Node] = set()
        self.reductions: dict[Node, Any] = {}  # row node -> its ATen op
        self.flattened: set[Node] = set()  # wide nodes that only change the other dimensions
        self._visit(a)

    def _visit(self, node: Node) -> None:
        if node in self.wide or node in self.rows:
            return
        size = self._last_size(node)
        inputs = node.all_input_nodes
        if size not in (1, self._k) or not inputs or self._ctx.stand_back(node):
            return
        ops = aten_ops(node, self._ctx.scopes) if node.op.startswith("call_") else None
        if ops is None:
            return
        sizes = {self._last_size(x) for x in inputs}
        if size == 1 and self._k in sizes and self._is_reduction(node, ops):
            self.reductions[node] = ops[0]
        elif size == self._k and self._flattens(node, ops):
            self.flattened.add(node)
        elif not all(_is_pointwise(op) for op in ops) or not sizes <= {1, size}:
            return
        (self.rows if size == 1 else self.wide).add(node)
        for x in inputs:
            self._visit(x)

    def _is_reduction(self, node: Node, ops: list[Any]) -> bool:
        x, out = tensor(node.args[0]) if node.args else None, tensor(node)
        if len(ops) != 1 or ops[0] not in _NEUTRAL or x is None or out is None:
            return False
        kept = (*x.shape[:-1], 1)  # of the last dimension only
        if len(node.all_input_nodes) != 1 or not all(map(same_size, out.shape, kept)):
            return False
        if x.dim() != out.dim() or x.dtype != out.dtype:
            return False
        # A sum in bfloat16 rounds once at its end, in a mean written as sum / k twice.
        return x.dtype in (torch.float32, torch.float64) or (
            ops[0] is aten.amax.default and x.is_floating_point()
        )

    def nodes(self) -> set[Node]:
        """All that it reads and computes."""
        inside = self.wide | self.rows
        return inside | {x for node in inside for x in node.all_input_nodes}

    def _flattens(self, node: Node, ops: list[Any]) -> bool:
        """``[..., k] -> [rows, k]``."""
        out, x = tensor(node), node.all_input_nodes[0]
        is_view = bool(ops) and all(op in _VIEWS for op in ops)
        return is_view and out is not None and out.dim() == 2 and self._last_size(x) == self._k

    def _last_size(self, node: Node) -> int | None:
        found = tensor(node)
        if found is None:
            return None
        if found.dim() == 0:
            return 1
        return int(found.shape[-1]) if is_static(found.shape[-1]) else None

    def _depends_on_reduction(self, order: Iterable[Node]) -> set[Node]:
        found = set(self.reductions)
        for node in order:
            if any(x in found for x in node.all_input_nodes):
                found.add(node)
        return found

    def before_float8(self) -> tuple[Node, list[Node]]:
        """The last node of the activation's computation that is not float8, and those behind it,
        the last one first."""
        casts, x = [], self._a
        while self._is_float8(x) and x in self.wide and len(x.all_input_nodes) == 1:
            casts.append(x)
            x = x.all_input_nodes[0]
        return (self._a, []) if self._is_float8(x) else (x, casts)

    def widen(self, end: Node, extra: int, value: float) -> Node:
        """``end`` at the padded extents, its new elements holding ``value``."""
        order = [n for n in self._a.graph.nodes if n in self.wide or n in self.rows]
        changed = self._depends_on_reduction(order)
        new: dict[Node, Node] = {}
        for node in order:
            if node not in self.wide and node not in changed:
                continue
            for x in node.all_input_nodes:
                if x not in new and self._last_size(x) == self._k:
                    new[x] = self.pad(x, extra)
            if node in self.reductions:
                new[node] = self._reduce(node, new[node.all_input_nodes[0]], extra)
            else:
                new[node] = self.copy(node, new, extra)
            if node is end:
                break
        for node in self.rows & changed & set(new):
            node.replace_all_uses_with(new[node], delete_user_cb=lambda user: user not in changed)
        return self._masked(new[end], extra, value)

    def _is_float8(self, x: Node) -> bool:
        found = tensor(x)
        return found is not None and found.dtype in _FLOAT8

    def pad(self, x: Node, extra: int, value: float = 0.0) -> Node:
        """A node at the padded extents by itself."""
        how = Padding((0, extra), value)
        if self._ctx.why_not_derivable(x) is None and self._ctx.charge(((x,), how)) is None:
            return self._ctx.derive(x.graph, (x,), how)  # the weight of a norm
        return _pad(x, extra, value, self._ctx)

    def copy(self, node: Node, new: dict[Node, Node], extra: int) -> Node:
        """A node with these inputs instead, right behind it."""
        if node in self.flattened:
            x = new[node.all_input_nodes[0]]
            return self._ctx.insert(node.next, "reshape", x, -1, self._k + extra, like=node)
        with node.graph.inserting_after(node):
            copy = node.graph.node_copy(node, lambda x: new.get(x, x))
        copy.meta = dict(node.meta)
        self._ctx.update_fake(copy)
        return copy

    def _reduce(self, node: Node, x: Node, extra: int) -> Node:
        op = self.reductions[node]
        masked = self._masked(x, extra, _NEUTRAL[op])
        if op is not aten.mean.dim:
            return self.copy(node, {node.args[0]: masked}, extra)  # type: ignore[dict-item]
        total = self._ctx.insert(node.next, torch.sum, masked, -1, True, like=node)
        return self._ctx.insert(total.next, torch.div, total, self._k, like=node)

    def _masked(self, x: Node, extra: int, value: float) -> Node:
        """x with its padded elements replaced; Inductor makes a mask of it."""
        cut = self._ctx.insert(_behind(x), "narrow", x, -1, 0, self._k, like=x)
        return self._ctx.insert(cut.next, F.pad, cut, [0, extra], value=value, like=x)


def _is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags or op in _ELEMENTWISE
