"""Calls of ops that have a contract: the one place that binds a node's arguments to the schema's
names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import (
    auto_functionalized,
    auto_functionalized_v2,
)
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from compile_ext.ops.contract import OpContract
from compile_ext.ops.registry import contract_of
from compile_ext.ops.third_party import ATEN_FUNCTIONS
from compile_ext.passes.values import fakes

FUNCTIONALIZED = (auto_functionalized, auto_functionalized_v2)


@dataclass(frozen=True)
class OpCall:
    """A call of an op that has a contract, its arguments by schema name."""

    node: Node
    op: OpOverload
    contract: OpContract
    arguments: dict[str, Any]

    @property
    def is_functional(self) -> bool:
        """A mutable op that ``auto_functionalized`` runs on copies of what it writes."""
        return self.node.target in FUNCTIONALIZED

    def rewrite(self, changes: dict[str, Any], op: OpOverload | None = None) -> None:
        """Give the node other arguments, or another op of the same schema; the node stays."""
        self.arguments.update(changes)
        if self.is_functional:
            _rewrite_functional(self.node, changes, op or self.op)
            return
        schema = self.op._schema.arguments
        self.node.target = op or self.op
        positional = [a for a in schema if not a.kwarg_only]
        while positional and _is_default(positional[-1], self.arguments):
            positional.pop()
        self.node.args = tuple(self.arguments[a.name] for a in positional)
        self.node.kwargs = {a.name: self.arguments[a.name] for a in schema if a.kwarg_only}


def _is_default(argument: Any, arguments: dict[str, Any]) -> bool:
    value = arguments[argument.name]
    is_plain = not isinstance(value, Node) and argument.has_default_value()
    return is_plain and value is argument.default_value


def read_call(node: Node) -> OpCall | None:
    """A call of an op with a contract; None as well for a node that a pass has erased."""
    if node.op != "call_function" or node._erased:
        return None
    if node.target in FUNCTIONALIZED:
        return _read_functional(node)
    op = overload(node)
    contract = contract_of(op) if op is not None else None
    arguments = _bind(op, node) if op is not None and contract is not None else None
    if op is None or contract is None or arguments is None:
        return None
    return OpCall(node, op, contract, arguments)


def overload(node: Node) -> OpOverload | None:
    """The overload that a node calls; of a packet, the one that torch would take."""
    target: Any = node.target
    name = getattr(target, "__name__", "")
    if name in ATEN_FUNCTIONS and target is getattr(torch, name, None):
        target = getattr(torch.ops.aten, name)  # torch._scaled_mm
    if isinstance(target, OpOverload):
        return target
    if not isinstance(target, OpOverloadPacket):
        return None
    overloads: list[OpOverload] = [getattr(target, name) for name in target.overloads()]
    if len(overloads) == 1:
        return overloads[0]
    if not any(contract_of(op) for op in overloads):
        return None
    # Fakes have the types that the resolution looks at. It raises where nothing fits.
    args, kwargs = fakes(node.args), fakes(node.kwargs)
    which: str = torch._C._jit_resolve_packet(target._qualified_op_name, *args, **kwargs)
    return next(op for op in overloads if op._overloadname == which)


def _read_functional(node: Node) -> OpCall | None:
    """``auto_functionalized(op, x=..., out=buffer)``; in the second version the buffers lie in a
    list, and what the op gets may be a view of one, which is not read here.
    """
    op: Any = node.args[0]
    contract = contract_of(op) if isinstance(op, OpOverload) else None
    if contract is None:
        return None
    bases: Any = node.kwargs.get("_all_bases", ())
    names = {a.name for a in op._schema.arguments}
    indices = {f"_{name}_base_index" for name in names}
    if not set(node.kwargs) <= {*names, *indices, "_all_bases"}:
        return None
    arguments: dict[str, Any] = {}
    for name in (a.name for a in op._schema.arguments):
        at: Any = node.kwargs.get(f"_{name}_base_index")
        arguments[name] = node.kwargs.get(name) if at is None else bases[at]
    return OpCall(node, op, contract, arguments)


def _rewrite_functional(node: Node, changes: dict[str, Any], op: OpOverload) -> None:
    kwargs: dict[str, Any] = dict(node.kwargs)
    for name, value in changes.items():
        at = kwargs.get(f"_{name}_base_index")
        if at is None:
            kwargs[name] = value
        else:
            bases = list(kwargs["_all_bases"])
            bases[at] = value
            kwargs["_all_bases"] = bases
    node.args, node.kwargs = (op, *node.args[1:]), kwargs


def _bind(op: OpOverload, node: Node) -> dict[str, Any] | None:
    schema = op._schema.arguments
    positional = [a.name for a in schema if not a.kwarg_only]
    if len(node.args) > len(positional) or not set(node.kwargs) <= {a.name for a in schema}:
        return None
    given = {**dict(zip(positional, node.args, strict=False)), **node.kwargs}
    bound: dict[str, Any] = {}
    for argument in schema:
        if argument.name in given:
            bound[argument.name] = given[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
        else:
            return None
    return bound
