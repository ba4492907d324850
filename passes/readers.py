"""Readers: the one place that knows how the Dynamo graph spells things.

Dynamo writes one thing many ways: a function, a method, an operator packet or overload, arguments
by position or by name. Each ``read_*`` returns what a node means, or None. A new spelling is one
line here and one test.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from compile_ext.passes.values import tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Cat:
    """``torch.cat(tensors, dim)``, dim 0 or more."""

    tensors: tuple[Node, ...]
    dim: int


@dataclass(frozen=True)
class PadCall:
    """``F.pad(x, pad, value=value)``: ``pad`` as there, last dimension first."""

    x: Node
    pad: tuple[int, ...]
    value: float


def op_name(target: Any) -> str:
    """A name for a node's target that does not change between torch versions."""
    if isinstance(target, OpOverload):
        return str(target._schema.name)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, str):
        return target
    return str(getattr(target, "_name", getattr(target, "__name__", target)))


def calls(node: Node, targets: set[Any]) -> bool:
    """Whether a node calls one of these functions; a packet (``torch.ops.aten.linear``) counts as
    its overload.
    """
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, OpOverloadPacket):
        return any(getattr(target, name) in targets for name in target.overloads())
    return target in targets


def get(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument, by position or by name."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


_CAST_METHODS = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
}


_CAST_FUNCTIONS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}


def read_cast(node: Node) -> torch.dtype | None:
    """The dtype that a node converts its first argument to, where it does nothing else."""
    if node.op == "call_method" and isinstance(node.target, str):
        if node.target in _CAST_METHODS:
            return _CAST_METHODS[node.target]
        if node.target in ("to", "type"):
            return _only_dtype(node)
    return _only_dtype(node) if calls(node, _CAST_FUNCTIONS) else None


def _only_dtype(node: Node) -> torch.dtype | None:
    given = [*node.args[1:], *(v for k, v in node.kwargs.items() if k == "dtype")]
    extra = {k: v for k, v in node.kwargs.items() if k != "dtype" and v not in (None, False)}
    dtypes = [x for x in given if isinstance(x, torch.dtype)]
    others = [x for x in given if not isinstance(x, (torch.dtype, bool)) and x is not None]
    return dtypes[0] if len(dtypes) == 1 and not others and not extra else None


_SOFTMAXES = {F.softmax, torch.softmax, aten.softmax.int}


def read_softmax(node: Node) -> torch.dtype | None:
    """The dtype in which a softmax computes: its ``dtype`` argument, else that of its input."""
    if not calls(node, _SOFTMAXES) and (node.op, node.target) != ("call_method", "softmax"):
        return None
    dtypes = [x for x in (*node.args[1:], node.kwargs.get("dtype")) if isinstance(x, torch.dtype)]
    if dtypes:
        return dtypes[0]
    found = tensor(node.args[0]) if node.args else None
    return found.dtype if found is not None else None


_FILLS = {
    torch.ones, torch.zeros, torch.full, torch.ones_like, torch.zeros_like, torch.full_like,
    torch.scalar_tensor, aten.scalar_tensor.default,
    aten.ones.default, aten.zeros.default, aten.full.default,
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default,
    aten.ones_like.default, aten.zeros_like.default, aten.full_like.default,
}  # fmt: skip
_FILL_METHODS = {"new_ones", "new_zeros", "new_full"}
_EMPTIES = {
    torch.empty, torch.empty_like, torch.empty_strided, aten.empty.memory_format,
    aten.empty_like.default, aten.empty_strided.default,
    aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip
_EMPTY_METHODS = {"new_empty", "new_empty_strided"}
# The fill value of those that take one, by what is behind "new_" and "::" in their name: position.
_VALUE_AT = {"full": 1, "new_full": 2, "full_like": 1, "scalar_tensor": 0}


def is_fill(node: Any) -> bool:
    """A tensor of one number that is made on each call: ones, zeros, full, in any spelling."""
    return fill_value(node) is not None


def fill_value(node: Any) -> float | None:
    """The number that a fill is full of; None for any other node, and where a node gives it."""
    if not isinstance(node, Node) or not _makes(node, _FILLS, _FILL_METHODS):
        return None
    name = op_name(node.target).split("::")[-1]
    if name not in _VALUE_AT:
        return 1 if "ones" in name else 0
    value = get(node, _VALUE_AT[name], "s" if name == "scalar_tensor" else "fill_value")
    return value if isinstance(value, (int, float)) else None


def is_constant(node: Any) -> bool:
    """A tensor, or a write of one, that holds numbers of the model's code: a fill,
    ``torch.tensor(1.0)``, ``fill_(1.0)``.
    """
    if not isinstance(node, Node):
        return False
    is_write = node.op == "call_method" and node.target in ("fill_", "zero_", "__setitem__")
    is_write |= calls(node, {torch.fill_, torch.zero_, operator.setitem})
    is_number = is_write and len(node.all_input_nodes) == 1
    return is_fill(node) or is_number or (calls(node, {torch.tensor}) and not node.all_input_nodes)


def is_empty(node: Any) -> bool:
    """An allocation without a fill."""
    return isinstance(node, Node) and _makes(node, _EMPTIES, _EMPTY_METHODS)


def _makes(node: Node, functions: set[Any], methods: set[str]) -> bool:
    if node.kwargs.get("out") is not None:
        return False  # it fills a buffer that others see
    if node.op == "call_method":
        return node.target in methods
    return calls(node, functions)


# Dynamo looks into F.pad and leaves what it calls.
_PADS = {F.pad, torch._C._nn.pad, aten.pad.default}  # pyright: ignore[reportAttributeAccessIssue]
_CONSTANT_PADS = {torch.constant_pad_nd, aten.constant_pad_nd.default}  # no mode argument


def read_pad(node: Node) -> PadCall | None:
    """A constant pad with static widths that only grows its input."""
    if not calls(node, _PADS | _CONSTANT_PADS):
        return None
    constant = calls(node, _CONSTANT_PADS)
    x, pad = get(node, 0, "input", node.kwargs.get("self")), get(node, 1, "pad")
    mode = "constant" if constant else get(node, 2, "mode", "constant")
    value = get(node, 2 if constant else 3, "value")
    if not isinstance(x, Node) or mode != "constant" or not isinstance(pad, (tuple, list)):
        return None
    if not all(type(p) is int and p >= 0 for p in pad):
        return None
    if value is not None and not isinstance(value, (int, float)):
        return None
    return PadCall(x, tuple(pad), 0 if value is None else value)


_TRANSPOSES = {torch.transpose, aten.transpose.int}
_PERMUTES = {torch.permute, aten.permute.default}


_CATS = {torch.cat, torch.concat, torch.concatenate, aten.cat.default}


def read_cat(node: Node) -> Cat | None:
    """Tensors one behind the other, where nothing gives them a dtype."""
    out = tensor(node)
    if not calls(node, _CATS) or out is None or not {*node.kwargs} <= {"tensors", "dim", "axis"}:
        return None
    tensors = get(node, 0, "tensors")
    dim = get(node, 1, "dim", node.kwargs.get("axis", 0))
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(x, Node) for x in tensors):
        return None
    return Cat(tuple(tensors), dim % out.dim())


def read_transpose(node: Any) -> Node | None:
    """The 2-D tensor of which a node is the transposed view."""
    if not isinstance(node, Node) or not node.args or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    found = tensor(source)
    if found is None or found.dim() != 2:
        return None
    rest = tuple(node.args[1:])
    if node.op == "call_method" and node.target == "t" and not rest:
        return source
    if calls(node, {torch.t, aten.t.default}):
        return source
    if node.op == "call_function" and node.target is getattr and rest in (("T",), ("mT",)):
        return source
    dims = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    order = [d % 2 for d in dims if isinstance(d, int)]
    if calls(node, _TRANSPOSES) or (node.op, node.target) == ("call_method", "transpose"):
        return source if sorted(order) == [0, 1] else None
    if calls(node, _PERMUTES) or (node.op, node.target) == ("call_method", "permute"):
        return source if order == [1, 0] else None
    return None


# What lies between a router's linear and the choice of experts: casts, scores, a bias, a new shape.
_SCORE_METHODS = {
    "softmax", "log_softmax", "sigmoid", "tanh", "sqrt", "add", "__add__", "add_", "sub",
    "masked_fill",
    "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous",
}  # fmt: skip
_SCORE_FUNCTIONS = _SOFTMAXES | {
    torch.sigmoid, F.sigmoid, aten.sigmoid.default, torch.log_softmax, F.log_softmax, torch.tanh,
    F.tanh, F.softplus, torch.sqrt, torch.add, aten.add.Tensor, operator.add, operator.iadd,
    torch.sub, operator.sub, torch.masked_fill, torch.reshape, torch.flatten, torch.unsqueeze,
}  # fmt: skip
_SCALINGS = {operator.mul, operator.truediv, torch.mul, torch.div}
_CHOICES = {torch.topk, aten.topk.default, torch.sort, torch.argmax, torch.max}


def is_choice(node: Node) -> bool:
    """It picks the largest of its input: top-k, argmax, a sort."""
    return calls(node, _CHOICES) or (
        node.op == "call_method" and node.target in ("topk", "sort", "argmax", "max")
    )


def is_score_step(node: Node) -> bool:
    """It keeps one value an expert: a cast, softmax, sigmoid, a bias, a factor, a new shape."""
    is_method = node.op == "call_method"
    if calls(node, _SCALINGS) or (is_method and node.target in ("mul", "div")):
        return len(node.all_input_nodes) == 1  # by a number: a product of tensors is no score
    if is_method and node.target in _SCORE_METHODS:
        return True
    return read_cast(node) is not None or calls(node, _SCORE_FUNCTIONS)


# Views keep the identity of a weight: `w[expert]`, `w.view(...)` still name the parameter `w`.
_VIEW_METHODS = {
    "transpose", "permute", "view", "reshape", "contiguous", "unsqueeze", "squeeze", "flatten",
    "unflatten", "narrow", "select", "expand", "__getitem__", "detach",
}  # fmt: skip
_VIEW_FUNCTIONS = {
    operator.getitem, torch.transpose, torch.permute, torch.reshape, torch.select, torch.squeeze,
    torch.unsqueeze, torch.flatten, torch.narrow, torch.detach,
    aten.transpose.int, aten.permute.default, aten.view.default, aten.reshape.default,
    aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim,
}  # fmt: skip


def weight_source(value: Any) -> Node | None:
    """The placeholder that a weight argument comes from through views, casts and pads."""
    while isinstance(value, Node) and value.op != "placeholder":
        value = value.args[0] if _keeps_identity(value) and value.args else None
    return value if isinstance(value, Node) else None


def is_view(node: Node) -> bool:
    """A view of its first argument, or a copy that stands for one (``contiguous``)."""
    if any(isinstance(x, torch.dtype) for x in (*node.args, *node.kwargs.values())):
        return False  # x.view(torch.int16)
    if node.op == "call_method" and node.target in _VIEW_METHODS:
        return True
    return read_transpose(node) is not None or calls(node, _VIEW_FUNCTIONS)


def _keeps_identity(node: Node) -> bool:
    return is_view(node) or read_cast(node) is not None or read_pad(node) is not None
