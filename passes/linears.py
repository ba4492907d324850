"""The reader of linear layers: every way to spell ``x [..., k] @ w [n, k].T + bias [n]``."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from compile_ext.ops.contract import Layout
from compile_ext.passes.readers import calls, get, read_transpose
from compile_ext.passes.values import same_size, tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Linear:
    """``x [..., k] @ weight.T + bias [n]``.

    Args:
        product: the node that multiplies: the linear itself, or what the bias is added to.
        layout: ``nt`` for a weight ``[n, k]``, ``nn`` for ``[k, n]``.
    """

    product: Node
    x: Node
    weight: Node
    bias: Node | None
    layout: Layout = "nt"


_LINEARS = {F.linear, aten.linear.default}  # F.linear is torch._C._nn.linear, Dynamo's name
_PRODUCTS = {
    operator.matmul, torch.matmul, torch.mm, aten.matmul.default, aten.mm.default, aten.mm.dtype,
}  # fmt: skip
_PRODUCT_METHODS = {"matmul", "mm", "__matmul__"}
_ADDMMS = {torch.addmm, aten.addmm.default, aten.addmm.dtype}
_ADDS = {operator.add, torch.add, aten.add.Tensor}
_ADD_METHODS = {"add", "__add__", "__radd__"}


def is_product(node: Node) -> bool:
    """Whether a linear is spelled as a product of matrices, which need not have a weight."""
    return not calls(node, _LINEARS)


def read_linear(node: Node) -> Linear | None:
    """A linear layer, as ``F.linear``, as a product with a matrix, or as that and a bias."""
    if node.kwargs.get("out") is not None:
        return None
    return _read_product(node) or _read_addmm(node) or _read_biased(node)


def _read_product(node: Node) -> Linear | None:
    if calls(node, _LINEARS):
        x, weight, bias = get(node, 0, "input"), get(node, 1, "weight"), get(node, 2, "bias")
        if not isinstance(x, Node) or not isinstance(weight, Node):
            return None
        # A bias of another shape, which is broadcast, makes it another sum.
        return Linear(node, x, weight, bias) if bias is None or _fits(bias, node) else None
    if calls(node, _PRODUCTS) or _is_method(node, _PRODUCT_METHODS):
        left = get(node, 0, "input", node.kwargs.get("self"))
        right = get(node, 1, "mat2", node.kwargs.get("other"))
        return _times(node, left, right)
    return _read_einsum(node)


def _times(node: Node, x: Any, right: Any, bias: Node | None = None) -> Linear | None:
    """``x @ right``, a matrix as checkpoints store it or its transpose."""
    found = tensor(right)
    if not isinstance(x, Node) or tensor(x) is None or found is None or found.dim() != 2:
        return None
    weight = read_transpose(right)
    if weight is not None:
        return Linear(node, x, weight, bias)
    return Linear(node, x, right, bias, layout="nn")


def _read_einsum(node: Node) -> Linear | None:
    """``einsum("td,ed->te", x, w)``."""
    if not calls(node, {torch.einsum}) or not isinstance(node.args[0], str):
        return None
    operands = node.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    inputs, _, out = node.args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(operands) != 2 or len(terms) != 2 or len(terms[1]) != 2:
        return None
    x, weight = operands
    if not isinstance(x, Node) or not isinstance(weight, Node):
        return None
    lead, k = terms[0][:-1], terms[0][-1:]
    n = terms[1].replace(k, "", 1)
    is_linear = len(n) == 1 and n not in terms[0] and k not in lead and out == lead + n
    rows, matrix = tensor(x), tensor(weight)
    if not is_linear or rows is None or matrix is None:
        return None
    if not same_size(rows.shape[-1], matrix.shape[terms[1].index(k)]):
        return None  # einsum repeats a K of 1
    return Linear(node, x, weight, None, layout="nt" if terms[1] == n + k else "nn")


def _read_addmm(node: Node) -> Linear | None:
    if not calls(node, _ADDMMS) and not _is_method(node, {"addmm"}):
        return None
    bias = get(node, 0, "input", node.kwargs.get("self"))
    scales = (node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1))
    product = _times(node, get(node, 1, "mat1"), get(node, 2, "mat2"), bias)
    if product is None or scales != (1, 1) or not _is_bias(bias, node):
        return None
    return product


def _read_biased(node: Node) -> Linear | None:
    """``x @ w.T + bias``, where nothing else reads the product."""
    if not calls(node, _ADDS) and not _is_method(node, _ADD_METHODS):
        return None
    if len(node.args) != 2 or node.kwargs:
        return None
    for product, bias in (node.args, node.args[::-1]):
        if not isinstance(product, Node) or len(product.users) != 1:
            continue
        linear = _read_product(product)
        # Of the product's columns: a sum may broadcast them, too.
        if linear is not None and linear.bias is None and _is_bias(bias, product):
            assert isinstance(bias, Node)
            return Linear(product, linear.x, linear.weight, bias, linear.layout)
    return None


def _is_bias(bias: Any, out: Node) -> bool:
    """Whether it is a number of at most 32 bits for each column of ``out``."""
    found = tensor(bias)
    is_narrow = found is not None and found.dtype.is_floating_point and found.element_size() <= 4
    return is_narrow and _fits(bias, out)


def _fits(bias: Any, out: Node) -> bool:
    """Whether it has one element for each column of ``out``."""
    found, whole = tensor(bias), tensor(out)
    if found is None or whole is None or found.dim() != 1 or whole.dim() == 0:
        return False
    return same_size(found.shape[0], whole.shape[-1])


def _is_method(node: Node, names: set[str]) -> bool:
    return node.op == "call_method" and node.target in names
