"""What a node stands for: its fake tensor, its storage, the range of a size."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg


def fake(value: Any) -> Any:
    """The example value of a node (a FakeTensor, a SymInt, a tuple of them); anything else as it
    is.
    """
    return value.meta.get("example_value") if isinstance(value, Node) else value


def fakes(args: Any) -> Any:
    """``args`` with every node in it, at any depth, replaced by its example value."""
    return map_arg(args, fake)


def tensor(value: Any) -> Tensor | None:
    """The fake tensor of a node, or None if it stands for something else."""
    found = fake(value)
    return found if isinstance(found, Tensor) else None


def storage(value: Any) -> int | None:
    """Identity of the storage that a node's tensor lives in: fakes of views share it with their
    base.
    """
    found = tensor(value)
    if found is None or found.layout != torch.strided:
        return None
    return int(found.untyped_storage()._cdata)


def is_static(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, torch.SymInt)


def bounds(size: int | torch.SymInt) -> tuple[int, int | None]:
    """The smallest and the largest value of a size; None for no upper bound."""
    if isinstance(size, int):
        return size, size
    node = size.node
    shape_env = getattr(node, "shape_env", None)
    if shape_env is None:
        return 0, None
    found = shape_env.bound_sympy(node.expr)
    upper = int(found.upper) if found.upper.is_Integer and int(found.upper) < 2**62 else None
    return (int(found.lower) if found.lower.is_Integer else 0), upper


def requires_grad(node: Node) -> bool:
    """What the fake says. Under no_grad that alone proves nothing: the fake of ``F.pad(parameter)``
    says True.
    """
    found = fake(node)
    leaves = found if isinstance(found, (tuple, list)) else (found,)
    return any(isinstance(x, Tensor) and x.requires_grad for x in leaves)


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
        if target in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
            written += node.args[:1]
        elif isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            written += _written_by_schema(target, node)
        elif node.kwargs.get("inplace") is True or (
            getattr(target, "__module__", "") == "torch.nn.functional" and True in node.args[1:]
        ):
            written += node.args[:1]
        elif (
            name == "triton_kernel_wrapper_mutation"
        ):  # a user's Triton kernel: any pointer may be written
            written += node.all_input_nodes
    elif node.op == "call_module":
        written += node.all_input_nodes
    written.append(node.kwargs.get("out"))
    return [x for group in written for x in _flat(group)]


def _flat(value: Any) -> list[Node]:
    if isinstance(value, (tuple, list)):
        return [x for v in value for x in _flat(v)]
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
    for (
        overload
    ) in overloads:  # of a packet any overload may be meant: take what any of them writes
        for i, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                written += value if isinstance(value, (tuple, list)) else [value]
    return written
