"""Who reads the logits: float32 for those that convert to it, the linear's dtype for others."""

from __future__ import annotations

import torch
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.readers import is_view, read_cast, read_softmax
from compile_ext.passes.router_linear.operands import same_view
from compile_ext.passes.values import tensor


def hand_out(node: Node, router: Node, ctx: PassContext, *, shared: bool = False) -> list[Node]:
    """Put the float32 logits of ``router`` in the place of ``node``, a linear's or a view of them.

    Args:
        shared: whether the memory of ``router`` has other readers.

    Returns:
        The readers that want them rounded to the dtype of ``node``, as before.
    """
    found = tensor(node)
    assert found is not None
    if found.dtype == torch.float32:
        ctx.replace(node, router)
        return []
    ctx.stands_for(router, node)
    users = list(node.users)
    shared = shared or len(users) > 1
    rounded: list[Node] = []
    for user in users:
        # What is written in between is another tensor for those that read it later.
        if ctx.is_written(node) or not _is_read_in_float32(user):
            rounded.append(user)
        elif read_cast(user) is not None:
            # Beside other readers, a cast is a tensor of its own, which others may see or write.
            is_own = shared and (ctx.is_written(user) or ctx.is_leaving(user))
            ctx.replace(user, ctx.insert(user, torch.clone, router) if is_own else router)
        elif read_softmax(user) is not None:
            user.replace_input_with(node, router)
        else:
            rounded += hand_out(user, same_view(user, router, user, ctx), ctx, shared=shared)
    if node.users:
        ctx.replace(node, ctx.insert(node, "to", router, found.dtype))
    else:
        ctx.erase_dead([node])
    return rounded


def _is_read_in_float32(user: Node) -> bool:
    if torch.float32 in (read_cast(user), read_softmax(user)):
        return True
    return is_view(user) and any(map(_is_read_in_float32, user.users))
