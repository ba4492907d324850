"""Put what a function computes into a graph, as calls of ATen ops."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from compile_ext.passes.context import PassContext
from compile_ext.passes.values import fake_mode, tensor

Function = Callable[[Tensor], tuple[Tensor, ...]]


class Inliner:
    """A function, traced once for each form of its argument: a trace takes 35 ms.

    All nodes of one form share the fakes of the trace, and so look like aliases of each other. That
    is safe, and matters to nobody: what a pass computes is not written.
    """

    def __init__(self, function: Function, ctx: PassContext) -> None:
        self._function, self._ctx = function, ctx
        self._traces: dict[Any, GraphModule] = {}

    def insert(self, x: Node, before: Node) -> tuple[Node, ...]:
        """``function(x)`` in front of ``before``; adds no guard."""
        graph = self._traced(x).graph
        (placeholder,) = graph.find_nodes(op="placeholder")
        new: dict[Node, Node] = {placeholder: x}
        for node in graph.nodes:
            if node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
                new[node] = self._ctx.insert_bare(before, node.target, args, kwargs, before)
                new[node].meta["example_value"] = node.meta["val"]
        results: Any = graph.output_node().args[0]
        return tuple(new[x] for x in results)

    def _traced(self, x: Node) -> GraphModule:
        found = tensor(x)
        assert found is not None
        form = found.dtype, found.device, str(found.shape), str(found.stride())
        if form not in self._traces:
            self._traces[form] = _trace(self._function, found, fake_mode(self._ctx.scopes))
        return self._traces[form]


def _trace(function: Function, x: Tensor, mode: Any) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx  # loads sympy, 0.2 s

    quiet = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
    # As in `call_on_fakes`.
    with torch.no_grad(), enable_python_dispatcher(), mode, quiet:
        return make_fx(function)(x)
