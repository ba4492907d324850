"""Mark the nodes that no pass may touch: those inside an autocast region.

An op with a contract is opaque to autocast, a linear is not: rewriting one into the other would change the
dtype it computes in. (Gradients need no marks: the fake of a node knows whether autograd records it.)
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from compile_ext.passes.context import STAND_BACK, PassContext

_REASON = "it is inside an autocast region"
_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast


def mark_regions(ctx: PassContext) -> None:
    """Set the meta key ``STAND_BACK`` on every node under autocast, in the root and in all bodies."""
    ambient = any(torch.is_autocast_enabled(d) for d in _devices(ctx))
    for scope in ctx.scopes:  # a graph comes before the bodies it calls
        outside = ambient or any(STAND_BACK in call.node.meta for call in scope.calls)
        _mark(scope.graph, outside)


def _mark(graph: Graph, outside: bool) -> None:
    entered: list[tuple[Node, bool]] = []
    for node in graph.nodes:
        if node.target is _ENTER:
            enabled = node.args[2] if len(node.args) > 2 else node.kwargs.get("enabled", True)
            entered.append((node, bool(enabled)))
        elif node.target is _EXIT:
            entered = [(n, on) for n, on in entered if n is not node.args[0]]
        elif entered[-1][1] if entered else outside:
            node.meta[STAND_BACK] = _REASON


def _devices(ctx: PassContext) -> set[str]:
    return {x.device.type for x in ctx.inputs if isinstance(x, torch.Tensor)} | {"cpu"}
