"""Which linears are routers: those whose output becomes scores, or that the user has marked."""

from __future__ import annotations

import torch
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.linears import Linear, read_linear
from compile_ext.passes.readers import is_choice, is_score_step, is_view, read_cast, read_softmax
from compile_ext.passes.router_linear.operands import exact_source
from compile_ext.passes.values import tensor


def linear_at(node: Node, ctx: PassContext) -> Linear | None:
    """The linear that this node completes. A product whose bias is added behind it is none."""
    linear = read_linear(node)
    if linear is None:
        return None
    if linear.product is not node:
        return None if _moves_over_a_write(linear, ctx) else linear
    for user in node.users:
        whole = read_linear(user)
        if whole is not None and whole.product is node and not _moves_over_a_write(whole, ctx):
            return None
    return linear


def _moves_over_a_write(linear: Linear, ctx: PassContext) -> bool:
    """Whether an operand may change between the product and the sum, where the op will stand."""
    return ctx.is_written(linear.x) or ctx.is_written(linear.weight)


def is_candidate(node: Node, linear: Linear, ctx: PassContext) -> bool:
    """Whether a linear's output becomes scores: a choice of experts follows, or a float32 softmax
    of 16-bit operands' logits, or the graph hands them out after a cast to float32 (the choice is
    then in another graph).

    A float32 cast alone is no sign of a router: the RMSNorm behind DeepSeek's q_a_proj has one too.
    """
    return is_marked(linear, ctx) or _becomes_scores(node, linear, ctx)


def is_marked(linear: Linear, ctx: PassContext) -> bool:
    """Whether ``compile_ext.mark_router`` names its weight."""
    return not ctx.marked.isdisjoint(ctx.root_inputs(linear.weight))


def _becomes_scores(node: Node, linear: Linear, ctx: PassContext) -> bool:
    x = tensor(exact_source(linear.x, ctx) or linear.x)
    is_narrow = x is not None and x.dtype != torch.float32
    seen: set[Node] = set()
    todo = [node]
    while todo:
        at = todo.pop()
        for user in at.users:
            if is_choice(user) or (is_narrow and read_softmax(user) == torch.float32):
                return True
            if user.op == "output" and _is_widened(at, node, linear):
                return True
            if is_score_step(user) and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _is_widened(at: Node, node: Node, linear: Linear) -> bool:
    """Whether ``at``, which the graph hands out, holds 16-bit logits as float32."""
    while at is not node and is_view(at):
        at = at.args[0]  # type: ignore[assignment]
    if at is node:  # torch.mm(out_dtype=torch.float32)
        before, after = tensor(linear.x), tensor(node)
    else:
        before, after = tensor(at.args[0]), tensor(at)
        if read_cast(at) is None:
            return False
    return (
        before is not None
        and after is not None
        and before.dtype != torch.float32
        and after.dtype == torch.float32
    )
