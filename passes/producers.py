"""Whether Inductor computes a tensor in the kernel of what reads it, or another one writes it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.norm_quantize.nodes import holds_tensors
from compile_ext.passes.purity import aten_ops
from compile_ext.passes.values import same_size, tensor

aten = torch.ops.aten
_RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.alias.default, aten.detach.default,
}  # fmt: skip
# What Inductor has as pointwise code and as reductions, without torch's tag for it.
_POINTWISE = {
    f"aten::{name}" for name in ("_to_copy", "cat", "clone", "constant_pad_nd", "embedding", "glu")
}
_REDUCTIONS = {f"aten::{name}" for name in ("_fused_rms_norm", "_softmax", "native_layer_norm")}


def before_reshapes(node: Node, ctx: PassContext) -> Node:
    """The node with the same elements in the same order, before views that only reshape it."""
    while True:
        ops = aten_ops(node, ctx.scopes)
        source = node.args[0] if node.args else None
        here, before = tensor(node), tensor(source)
        if ops is None or here is None or before is None or not isinstance(source, Node):
            return node
        if not all(op in _RESHAPES for op in ops) or not same_size(here.numel(), before.numel()):
            return node
        node = source


def is_pointwise(node: Node, ctx: PassContext) -> bool:
    """Whether a tensor is pointwise code with no reduction before it in the same kernel.

    Inductor fuses one reduction more into such a kernel. Behind a reduction of another extent (a
    softmax, a norm) it starts a kernel, and a view of what a GEMM has written is no kernel at all.
    """
    todo, seen, is_computed = [node], set[Node](), False
    while todo:
        at = todo.pop()
        if at in seen or not holds_tensors(at):
            continue
        seen.add(at)
        ops = aten_ops(at, ctx.scopes)
        if ops is None:
            continue
        if any(map(_is_reduction, ops)):
            return False
        if all(op.is_view or _is_pointwise(op) for op in ops):
            is_computed |= not all(op.is_view for op in ops)
            todo += at.all_input_nodes
    return is_computed


def _is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags or op._schema.name in _POINTWISE


def _is_reduction(op: Any) -> bool:
    return torch.Tag.reduction in op.tags or op._schema.name in _REDUCTIONS
