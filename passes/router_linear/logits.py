"""Who reads the logits: float32 for those that convert to it, the linear's dtype for others."""

from __future__ import annotations

import torch
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.readers import is_view, read_cast, read_softmax
from compile_ext.passes.router_linear.operands import same_view
from compile_ext.passes.values import tensor


def hand_out(node: Node, router: Node, ctx: PassContext) -> list[Node]:
    """Put the float32 logits of ``router`` in the place of ``node``, a linear's.

    Returns:
        The readers that get them rounded to the dtype of ``node``, as before.
    """
    found = tensor(node)
    assert found is not None
    if found.dtype == torch.float32:
        ctx.replace(node, router)
        return []
    ctx.stands_for(router, node)
    # What is written in between is another tensor for those that read it later.
    rounded = list(node.users) if ctx.is_written(node) else _hand_float32(node, router, ctx)
    if node.users:
        ctx.replace(node, ctx.insert(node, "to", router, found.dtype))
    else:
        ctx.erase_dead([node])
    return rounded


def _hand_float32(
    node: Node, logits: Node, ctx: PassContext, *, shared: bool = False
) -> list[Node]:
    """Let those that convert ``node``, or a view of it, read ``logits``; returns the others.

    Args:
        shared: whether the memory of ``logits`` has other readers.
    """
    users = list(node.users)
    shared = shared or len(users) > 1
    others: list[Node] = []
    for user in users:
        if not _is_read_in_float32(user):
            others.append(user)
        elif read_cast(user) is not None:
            # Beside other readers, a cast is a tensor of its own, which others may see or write.
            is_own = shared and (ctx.is_written(user) or ctx.is_leaving(user))
            ctx.replace(user, ctx.insert(user, torch.clone, logits) if is_own else logits)
        elif read_softmax(user) is not None:
            user.replace_input_with(node, logits)
        else:
            view = same_view(user, logits, user, ctx)
            ctx.stands_for(view, user)
            others += _hand_float32(user, view, ctx, shared=shared)
            ctx.erase_dead([user])
    return others


def _is_read_in_float32(user: Node) -> bool:
    if torch.float32 in (read_cast(user), read_softmax(user)):
        return True
    return is_view(user) and any(map(_is_read_in_float32, user.users))
