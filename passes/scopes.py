"""The graphs of one compilation: the root graph, and the bodies of its higher-order ops (cond,
checkpoint...).

A pass sees one graph at a time. What crosses from one graph into another, an operand of a
higher-order op, is handled here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

# Where a higher-order op keeps the operands that become placeholders of its bodies: the index of
# the first operand, or of the one argument that holds them all as a tuple. An op that is not here
# keeps its body closed: passes rewrite inside it but hand no new operand in.
_FLAT_OPERANDS = {
    "invoke_subgraph": 2,
    "tag_activation_checkpoint": 1,
    "wrap": 1,
    "wrap_activation_checkpoint": 1,
}
_TUPLE_OPERANDS = {"cond": 3}

_SOURCE = "_dynamo_source"  # where Dynamo keeps on a placeholder what it stands for


@dataclass(eq=False)
class Call:
    """One call of a higher-order op: ``node`` in the graph of ``parent`` runs ``bodies``."""

    parent: Scope
    node: Node
    bodies: list[Scope] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(getattr(self.node.target, "_name", self.node.target))

    def operands(self) -> list[Any] | None:
        """What the placeholders of the bodies stand for; None for an op not known here."""
        if self.name in _TUPLE_OPERANDS:
            return list(self.node.args[_TUPLE_OPERANDS[self.name]])  # type: ignore[arg-type]
        if self.name in _FLAT_OPERANDS:
            return list(self.node.args[_FLAT_OPERANDS[self.name] :])
        return None

    def append(self, operand: Node) -> None:
        if self.name in _TUPLE_OPERANDS:
            at = _TUPLE_OPERANDS[self.name]
            self.node.update_arg(at, (*self.node.args[at], operand))  # type: ignore[misc]
        else:
            self.node.args = (*self.node.args, operand)


@dataclass(eq=False)
class Scope:
    """One graph, and the calls that lead into it (none for the root, several for a shared body)."""

    module: GraphModule
    calls: list[Call] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        return self.module.graph

    def placeholders(self) -> list[Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    def add_placeholder(self, name: str, meta: dict[str, Any]) -> Node:
        last = self.placeholders()[-1:]
        point = self.graph.inserting_after(last[0]) if last else self.graph.inserting_before()
        with point:
            node = self.graph.placeholder(name)
        node.meta.update(meta)
        return node


def body_modules(module: GraphModule) -> Iterator[tuple[Node, GraphModule]]:
    """The get_attr nodes of a graph that hold the body of a higher-order op."""
    for node in module.graph.find_nodes(op="get_attr"):
        value = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, GraphModule):
            yield node, value


def copy_module(module: GraphModule, memo: dict[int, GraphModule] | None = None) -> GraphModule:
    """A private copy: Dynamo re-reads its own graph, and may call the backend twice with one graph.

    Bodies are copied with it; a body that two calls share stays shared.
    """
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]
    graph = Graph()
    old_to_new: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, old_to_new))
    for old, new in old_to_new.items():
        new.meta = dict(old.meta)
        if hasattr(old, _SOURCE):
            setattr(new, _SOURCE, getattr(old, _SOURCE))
    copy = GraphModule(module, graph, class_name=type(module).__name__)
    memo[id(module)] = copy
    copy.meta = dict(module.meta)
    for attribute in ("_param_name_to_source", "_backend_id"):
        if hasattr(module, attribute):
            setattr(copy, attribute, getattr(module, attribute))
    for node, body in body_modules(module):
        _set(copy, str(node.target), copy_module(body, memo))
    return copy


def _set(module: torch.nn.Module, path: str, value: GraphModule) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        module = getattr(module, parent)
    setattr(module, name, value)


def find_scopes(root: GraphModule) -> list[Scope]:
    """The root's scope first, then those of all bodies, each once."""
    scopes: dict[int, Scope] = {}

    def visit(module: GraphModule) -> Scope:
        if id(module) in scopes:
            return scopes[id(module)]
        scope = scopes[id(module)] = Scope(module)
        for node, body in body_modules(module):
            inner = visit(body)
            for user in node.users:
                call = next((c for c in inner.calls if c.node is user), None)
                if call is None:
                    inner.calls.append(Call(scope, user))
        return scope

    visit(root)
    for scope in scopes.values():
        for call in scope.calls:
            call.bodies = [s for s in scopes.values() if any(c.node is call.node for c in s.calls)]
    return list(scopes.values())
