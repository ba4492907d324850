"""Mark the nodes that no pass may touch: those under autocast, and those that autograd records.

An op with a contract is opaque to autocast, a linear is not: rewriting one into the other would
change the dtype it computes in. The ops have no gradient, and a derived constant is detached from
its parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Node

from compile_ext.passes.context import STAND_BACK, PassContext
from compile_ext.passes.values import requires_grad

_AUTOCAST = "it is inside an autocast region"
_GRAD = "it needs a gradient"
_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
_EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
_SET_GRAD = torch._C._set_grad_enabled
_ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode


@dataclass
class _State:
    """What holds at a point of the graph. Open regions are keyed by the node that entered them."""

    grad: bool
    autocast: bool
    autocasts: dict[Node, bool] = field(default_factory=dict)
    inference: dict[Node, bool] = field(default_factory=dict)

    def step(self, node: Node) -> None:
        if node.target is _ENTER_AUTOCAST:
            enabled = node.args[2] if len(node.args) > 2 else node.kwargs.get("enabled", True)
            self.autocasts[node] = bool(enabled)
        elif node.target is _EXIT_AUTOCAST:
            self.autocasts.pop(node.args[0], None)  # type: ignore[arg-type]
        elif node.target is _SET_GRAD:
            self.grad = bool(node.args[0])
        elif node.target is _ENTER_INFERENCE:
            self.inference[node] = bool(node.args[0])
        elif node.target is _EXIT_INFERENCE:
            self.inference.pop(node.args[0], None)  # type: ignore[arg-type]

    @property
    def in_autocast(self) -> bool:
        return next(reversed(self.autocasts.values()), self.autocast)

    @property
    def in_grad(self) -> bool:
        return self.grad and not next(reversed(self.inference.values()), False)


def mark_regions(ctx: PassContext) -> None:
    """Set the meta key ``STAND_BACK`` of such nodes to the reason, in root and bodies."""
    devices = {x.device.type for x in ctx.inputs if isinstance(x, torch.Tensor)} | {"cpu"}
    autocast = any(
        torch.is_autocast_enabled(d) for d in devices if torch.amp.is_autocast_available(d)
    )
    at_call: dict[Node, tuple[bool, bool]] = {}
    for scope in ctx.scopes:  # a graph comes before the bodies that it calls
        around = [at_call[c.node] for c in scope.calls] or [(torch.is_grad_enabled(), autocast)]
        state = _State(grad=any(g for g, _ in around), autocast=any(a for _, a in around))
        for node in scope.graph.nodes:
            state.step(node)
            at_call[node] = state.in_grad, state.in_autocast
            if state.in_autocast:
                node.meta[STAND_BACK] = _AUTOCAST
            elif state.in_grad and requires_grad(node):
                node.meta[STAND_BACK] = _GRAD
