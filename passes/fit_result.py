"""Give a result of the op the form of the node whose place it takes."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from compile_ext.ops.define import definition_of
from compile_ext.passes.context import PassContext
from compile_ext.passes.expressions.forms import same_shape
from compile_ext.passes.op_calls import overload
from compile_ext.passes.padding.cut_output import cannot_tell, same_form
from compile_ext.passes.values import fake, is_static, same_size, tensor


def fit_result(new: Node, old: Node, x: Node, before: Node, ctx: PassContext) -> Node | str:
    """``new`` as the readers of ``old`` expect it, or why it cannot be. ``x`` lends its sizes."""
    want, have = tensor(old), tensor(new)
    assert want is not None
    assert have is not None
    if not same_shape(want, have):
        sizes = _sizes(old, x, before, ctx)
        if sizes is None:
            return f"the sizes of {old.name} are none of x"
        new = ctx.insert(before, "view", new, *sizes, like=old)
    value = fake(new)
    if same_form(value, want) or all(_takes(user, old, value, ctx) for user in old.users):
        return new
    if not want.is_contiguous():
        return f"{old.name} has strides {list(want.stride())}"
    # Readers that may address the memory themselves (an op of somebody's, the output).
    return ctx.insert(before, "clone", new, memory_format=torch.contiguous_format, like=old)


def _sizes(old: Node, x: Node, before: Node, ctx: PassContext) -> list[int | Node] | None:
    """The shape of a node as arguments: numbers, one -1, or the sizes of x."""
    want, lender = tensor(old), tensor(x)
    assert want is not None
    assert lender is not None
    symbolic = [size for size in want.shape if not is_static(size)]
    sizes: list[int | Node] = []
    for size in want.shape:
        at = next((i for i, s in enumerate(lender.shape) if same_size(s, size)), None)
        if is_static(size):
            sizes.append(int(size))
        elif len(symbolic) == 1:
            sizes.append(-1)
        elif at is not None:
            sizes.append(ctx.insert(before, "size", x, at, like=old))
        else:
            given = _input_of(old.graph, size)
            if given is None:
                return None
            sizes.append(given)
    return sizes


def _input_of(graph: Graph, size: int | torch.SymInt) -> Node | None:
    """The input of a graph that is this size: Dynamo hands in each that is dynamic."""
    node: Node
    for node in graph.find_nodes(op="placeholder"):
        value = fake(node)
        if isinstance(value, torch.SymInt) and same_size(value, size):
            return node
    return None


def _takes(user: Node, old: Node, value: torch.Tensor, ctx: PassContext) -> bool:
    """Whether a reader gives the same whatever the strides are; our own ops take any."""
    op = overload(user)
    return (op is not None and definition_of(op) is not None) or cannot_tell(
        user, {old: value}, ctx
    )
