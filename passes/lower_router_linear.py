"""Give the router of a mixture-of-experts layer its own op: bfloat16 in, float32 logits out.

    before: float(linear(x, w))                   after: router_gemm(x, w)
    before: softmax(linear(x, w), dtype=float32)  after: softmax(router_gemm(x, w), dtype=float32)

Legal: x and w are bfloat16, N is at most 2048, and every reader of the linear converts it to
float32 first. The logits are then not rounded to bfloat16 in between: closer to exact than the
original, by up to 2^-9 relative.
A candidate is a linear whose output becomes scores (see ``_is_candidate``); others are not listed.
Bails: a reader that wants the bfloat16 logits, other dtypes, autocast, a gradient.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from compile_ext.ops.router_gemm import OP as ROUTER_GEMM
from compile_ext.passes.context import PassContext
from compile_ext.passes.readers import (
    Linear,
    is_choice,
    is_score_step,
    read_cast,
    read_linear,
    read_softmax,
)
from compile_ext.passes.values import dtype_name, is_static, tensor

MAX_EXPERTS = 2048  # a wider linear is a projection or an LM head


def lower_router_linear(graph: Graph, ctx: PassContext) -> None:
    for node in list(graph.nodes):
        linear = read_linear(node)
        if linear is None or not _is_candidate(node):
            continue
        ctx.entry(node, linear.weight)
        reason = ctx.stand_back(node) or _why_not(node, linear)
        if reason:
            ctx.skipped(node, reason)
            continue
        ctx.fired(node, "logits stay in float32")
        router = ctx.insert(node, ROUTER_GEMM, linear.x, linear.weight, linear.bias, like=node)
        alone = len(node.users) == 1
        for cast in [u for u in node.users if read_cast(u) is not None]:
            # Beside other readers, a cast is a tensor of its own, which the graph may write.
            ctx.replace(cast, router if alone else ctx.insert(cast, torch.clone, router))
        ctx.replace(node, router)


def _is_candidate(node: Node) -> bool:
    """Whether a linear's output becomes scores: a choice of experts follows, or a float32 softmax,
    or the graph hands it out after a cast to float32 (the choice is then in another graph).

    A float32 cast alone is no sign of a router: the RMSNorm behind DeepSeek's q_a_proj has one too.
    """
    out = tensor(node)
    widens = out is not None and out.dtype != torch.float32
    seen: set[Node] = set()
    todo = [node]
    while todo:
        at = todo.pop()
        for user in at.users:
            if is_choice(user) or read_softmax(user) == torch.float32:
                return True
            if user.op == "output" and widens and read_cast(at) == torch.float32:
                return True
            if is_score_step(user) and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _reads_in_float32(user: Node) -> bool:
    return torch.float32 in (read_cast(user), read_softmax(user))


def _why_not(node: Node, linear: Linear) -> str | None:
    x, weight = tensor(linear.x), tensor(linear.weight)
    if x is None or weight is None or weight.dim() != 2:
        return "its weight is not a matrix"
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"x is {dtype_name(x)} and the weight {dtype_name(weight)}, not bfloat16"
    if not is_static(weight.shape[0]) or weight.shape[0] > MAX_EXPERTS:
        return f"N={weight.shape[0]} is more than {MAX_EXPERTS}: not a router"
    if x.device != weight.device:
        return "x and the weight are on different devices"
    others = [u for u in node.users if not _reads_in_float32(u)]
    if others:
        return f"{others[0].name} reads the bfloat16 logits"
    return None
