"""What the nodes of a graph write: in-place methods and operators, ``out=``, mutable ops."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from compile_ext.passes.scopes import Call, Scope
from compile_ext.passes.values import storage

# In-place spellings of operator: `x += 1` reaches the graph as operator.iadd, or as the method
# __iadd__.
_INPLACE_NAMES = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    *("ilshift", "irshift", "imatmul", "setitem"),
)
_INPLACE_OPERATORS = {getattr(operator, name) for name in _INPLACE_NAMES}
_INPLACE_METHODS = {f"__{name}__" for name in _INPLACE_NAMES}


def written_arguments(node: Node) -> list[Node]:
    """The nodes whose tensors this node writes, as far as it can be told from its spelling and
    schema.
    """
    written: list[Any] = []
    if node.op == "call_method":
        name = str(node.target)
        if (name.endswith("_") and not name.endswith("__")) or name in _INPLACE_METHODS:
            written.append(node.args[0])
    elif node.op == "call_function":
        target = node.target
        name = str(getattr(target, "__name__", ""))
        if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            # Before its name: `merge_` may write another argument than the first.
            written += _written_by_schema(target, node)
        elif target in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
            written += _first(node)
        elif target in (F.embedding, F.embedding_bag, *_WRITES_AT):
            written += _hidden_writes(node)
        elif _is_inplace(target, node):
            written += _first(node)
        elif (
            name == "triton_kernel_wrapper_mutation"
        ):  # a user's Triton kernel: any pointer may be written
            written += node.all_input_nodes
    elif node.op == "call_module":
        written += node.all_input_nodes
    written.append(node.kwargs.get("out"))
    return [x for group in written for x in nodes_in(group)]


def _first(node: Node) -> list[Any]:
    """The first argument, by position or by the name that torch gives it."""
    names = [x for x in ("input", "self", "tensor") if x in node.kwargs]
    return list(node.args[:1]) or [node.kwargs[x] for x in names[:1]]


_PLAIN_METHODS = {"copy_", "fill_", "zero_", "__setitem__"}
_PLAIN_FUNCTIONS = {operator.setitem, torch.fill_, torch.zero_}


def is_plain_write(node: Node) -> bool:
    """It puts values into a buffer and does nothing else: a copy, a fill."""
    if node.op == "call_method":
        return node.target in _PLAIN_METHODS
    return node.op == "call_function" and node.target in _PLAIN_FUNCTIONS


# Running statistics: functions that write arguments without saying so in their name.
_WRITES_AT = {
    F.batch_norm: (1, 2),
    F.instance_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.instance_norm: (3, 4),
}


def _hidden_writes(node: Node) -> list[Any]:
    if node.target in (F.embedding, F.embedding_bag):  # max_norm scales the rows that it looks up
        max_norm = node.kwargs.get("max_norm")
        at = 3 if node.target is F.embedding else 4
        is_scaled = max_norm is not None or (len(node.args) > at and node.args[at] is not None)
        weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
        return [weight] if is_scaled else []
    positions = _WRITES_AT.get(node.target, ())  # type: ignore[arg-type]
    written = [node.args[at] for at in positions if at < len(node.args)]
    return [*written, node.kwargs.get("running_mean"), node.kwargs.get("running_var")]


def _is_inplace(target: Any, node: Node) -> bool:
    """``F.relu(x, inplace=True)`` and its like."""
    if getattr(target, "__module__", "") != "torch.nn.functional":
        return node.kwargs.get("inplace") is True
    names = list(inspect.signature(target).parameters)
    at = names.index("inplace") if "inplace" in names else len(node.args)
    given = node.args[at] if at < len(node.args) else node.kwargs.get("inplace")
    return given is True


def nodes_in(value: Any) -> list[Node]:
    """The nodes in an argument: itself, or those of a list of tensors."""
    if isinstance(value, (tuple, list)):
        return [x for v in value for x in nodes_in(v)]
    return [value] if isinstance(value, Node) else []


def _written_by_schema(
    target: torch._ops.OpOverload | torch._ops.OpOverloadPacket, node: Node
) -> list[Any]:
    overloads = (
        [target]
        if isinstance(target, torch._ops.OpOverload)
        else [getattr(target, name) for name in target.overloads()]
    )
    written: list[Any] = []
    # Of a packet any overload may be meant: take what any of them writes.
    for overload in overloads:
        for i, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                written += value if isinstance(value, (tuple, list)) else [value]
    return written


def written_storages(scopes: Sequence[Scope]) -> set[int]:
    """Storages that any node of these graphs writes, bodies of higher-order ops included."""
    written: set[int | None] = set()
    for scope in reversed(scopes):  # bodies before the graphs that call them
        for node in scope.graph.nodes:
            written |= {storage(x) for x in written_arguments(node)}
        for call in scope.calls:
            written |= {storage(x) for x in written_operands(scope, call, written)}
    return {s for s in written if s is not None}


def written_operands(scope: Scope, call: Call, written: Collection[int | None]) -> list[Node]:
    """What a call hands to its body ``scope`` and the body writes."""
    placeholders, operands = scope.placeholders(), call.operands()
    if operands is None:  # an unknown op: whatever it takes may be written by its body
        is_writing = any(storage(p) in written for p in placeholders)
        return call.node.all_input_nodes if is_writing else []
    pairs = zip(placeholders, operands, strict=False)
    return [x for p, x in pairs if storage(p) in written and isinstance(x, Node)]


def leaving_storages(scopes: Sequence[Scope]) -> set[int]:
    """Storages that a graph returns, or hands to a higher-order op that is not known here."""
    leaving: set[int | None] = set()
    for scope in scopes:
        for node in scope.graph.find_nodes(op="output"):
            leaving |= {storage(x) for x in node.all_input_nodes}
        for call in scope.calls:
            if call.operands() is None:
                leaving |= {storage(x) for x in call.node.all_input_nodes}
    return {s for s in leaving if s is not None}
