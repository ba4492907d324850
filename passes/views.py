"""What a node is a view of, and whether it is written through a view."""

from __future__ import annotations

import torch
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.effects import written_arguments
from compile_ext.passes.purity import aten_ops
from compile_ext.passes.values import same_size, storage, tensor

aten = torch.ops.aten
_RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.alias.default, aten.detach.default,
}  # fmt: skip


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


def is_written_through(node: Node, ctx: PassContext) -> bool:
    """Whether the graph writes what a pass has inserted, or a view of it. By use, and not by
    storage: views of the node whose place it has taken still have the storage of that one."""
    if storage(node) in ctx.written_by_bodies(node.graph):
        return True
    for user in node.users:
        if node in written_arguments(user):
            return True
        ops = aten_ops(user, ctx.scopes)
        if ops and any(op.is_view for op in ops) and is_written_through(user, ctx):
            return True
    return False
