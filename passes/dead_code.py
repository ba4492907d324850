"""Erase what nobody reads any more: values, and the buffers that are written and then not read.

Not ``eliminate_dead_code``: in a Dynamo graph that also removes ``x.add_(1)`` whose result nobody
reads. The unit here is a storage: what allocates it, what writes it, and its views go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch._ops import OpOverload
from torch.fx import Node

from compile_ext.ops.registry import contract_of
from compile_ext.passes.effects import is_plain_write, written_arguments
from compile_ext.passes.op_calls import FUNCTIONALIZED, overload
from compile_ext.passes.purity import aten_ops, is_pure
from compile_ext.passes.scopes import Scope
from compile_ext.passes.values import storage

_SEEDED = torch.Tag.nondeterministic_seeded


def erase_dead(ends: Iterable[Node], scopes: Sequence[Scope]) -> None:
    """Erase those of ``ends`` that nobody reads, and then what only they have read."""
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node._erased or not all(_may_be_dead(user, node) for user in node.users):
            continue
        group = _group(node)
        is_read = any(user not in group for x in group for user in x.users)
        if is_read or not all(is_erasable(x, scopes) for x in group):
            continue
        todo += {y: None for x in group for y in x.all_input_nodes if y not in group}
        while group:
            for x in [x for x in group if not x.users]:
                x.graph.erase_node(x)
                group.discard(x)


def erase_writes(writes: Iterable[Node]) -> None:
    """Erase plain writes. ``fill_`` and its like return what they write: the buffer itself."""
    for write in writes:
        if write.users:
            write.replace_all_uses_with(written_arguments(write)[0])
        write.graph.erase_node(write)


def _may_be_dead(user: Node, node: Node) -> bool:
    """It writes ``node``, or is a view of it, and so may go with it."""
    return any(storage(x) == storage(node) for x in (user, *written_arguments(user)))


def _group(node: Node) -> set[Node]:
    """A value or a view that nobody reads; of a buffer that is written: the nodes that share its
    storage, and those that do nothing but write it."""
    if not node.users and not written_arguments(node):
        return {node}
    group: set[Node] = set()
    storages = {storage(node)}
    todo = [node]
    while todo:
        x = todo.pop()
        if x in group:
            continue
        group.add(x)
        # Whatever shares a storage is reached from its allocation through views.
        todo += [y for y in (*x.all_input_nodes, *x.users) if storage(y) in storages - {None}]
        for user in x.users:
            if not user.users and (written := written_arguments(user)):
                storages |= {storage(y) for y in written}
                todo += [user, *written]
    return group


def is_erasable(node: Node, scopes: Sequence[Scope]) -> bool:
    """It computes a value, or fills a buffer, and does nothing else."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in FUNCTIONALIZED:
        return _is_declared(node.args[0])  # type: ignore[arg-type]
    op = overload(node)
    if written_arguments(node):
        return is_plain_write(node) or _is_declared(op)
    if op is not None and op.namespace not in ("aten", "prims"):
        return _SEEDED not in op.tags and not node.is_impure()
    ops = aten_ops(node, scopes)
    return ops is not None and is_pure(ops)


def _is_declared(op: OpOverload | None) -> bool:
    """Whether its author says what it reads and writes, in a contract."""
    return op is not None and contract_of(op) is not None and _SEEDED not in op.tags
