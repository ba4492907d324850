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
from compile_ext.passes.values import in_transform, requires_grad

# Its fakes are dead wrappers after tracing: not even a site can be read off them.
TRANSFORM = "it is inside a transform of torch.func"
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
    autocast: dict[str, bool]  # device type -> whether autocast is on around the graph
    autocasts: dict[Node, tuple[str, bool]] = field(default_factory=dict)
    inference: dict[Node, bool] = field(default_factory=dict)

    def step(self, node: Node) -> None:
        if node.target is _ENTER_AUTOCAST:
            enabled = node.args[2] if len(node.args) > 2 else node.kwargs.get("enabled", True)
            device = str(next(iter(node.args)))
            self.autocasts[node] = device, bool(enabled)
        elif node.target is _EXIT_AUTOCAST:
            self.autocasts.pop(node.args[0], None)  # type: ignore[arg-type]
        elif node.target is _SET_GRAD:
            self.grad = bool(node.args[0])
        elif node.target is _ENTER_INFERENCE:
            self.inference[node] = bool(node.args[0])
        elif node.target is _EXIT_INFERENCE:
            self.inference.pop(node.args[0], None)  # type: ignore[arg-type]

    def autocast_now(self) -> dict[str, bool]:
        """Of each device type, what the innermost region says."""
        return {**self.autocast, **dict(self.autocasts.values())}

    def grad_now(self) -> bool:
        return self.grad and not next(reversed(self.inference.values()), False)


def mark_regions(ctx: PassContext) -> None:
    """Set the meta key ``STAND_BACK`` of such nodes to the reason, in root and bodies."""
    tensors = [x for x in ctx.inputs if isinstance(x, torch.Tensor)]
    devices = {x.device.type for x in tensors} | {"cpu"}
    autocast = {
        d: torch.is_autocast_enabled(d) for d in devices if torch.amp.is_autocast_available(d)
    }
    # A constant that backward has saved must not be refreshed in place: where anything is recorded,
    # nothing is rewritten.
    records = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    at_call: dict[Node, tuple[bool, dict[str, bool]]] = {}
    for scope in ctx.scopes:  # a graph comes before the bodies that it calls
        around = [at_call[c.node] for c in scope.calls] or [(torch.is_grad_enabled(), autocast)]
        state = _State(
            grad=any(g for g, _ in around),
            autocast={d: any(a.get(d, False) for _, a in around) for _, a in around for d in a},
        )
        for node in scope.graph.nodes:
            state.step(node)
            at_call[node] = state.grad_now(), state.autocast_now()
            if any(state.autocast_now().values()):
                node.meta[STAND_BACK] = _AUTOCAST
            elif state.grad_now() and (records or requires_grad(node)):
                node.meta[STAND_BACK] = _GRAD
            elif any(in_transform(x) for x in (node, *node.all_input_nodes)):
                node.meta[STAND_BACK] = TRANSFORM
