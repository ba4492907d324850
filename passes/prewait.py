"""Whether a kernel may read its weight before its PDL wait, while the one in front still runs."""

from __future__ import annotations

from torch.fx import Graph, Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.op_calls import OpCall
from compile_ext.passes.values import storage


class Prewait:
    """For the time of one pass, which adds no input."""

    def __init__(self, ctx: PassContext) -> None:
        self._ctx = ctx
        self._scopes = {scope.graph: scope for scope in ctx.scopes}
        self._inputs: dict[Graph, dict[int | None, int]] = {}

    def why_not(self, call: OpCall) -> str | None:
        """Why a kernel of the graph may be writing what the contract names in ``prewait_reads``, or
        None: all of it lies in inputs of the graph that nothing in it writes."""
        for name in call.contract.prewait_reads:
            value = call.arguments[name]
            if not isinstance(value, Node):
                continue
            if self._ctx.is_written(value):
                return f"the graph writes {name}"
            if not self._is_input(value):
                return f"{name} is not an input of the graph"
        return None

    def _is_input(self, value: Node) -> bool:
        """Whether a tensor lies in an input of the root, or is handed into its body from one by
        each call of the body."""
        at = self._inputs_of(value.graph).get(storage(value))
        if at is None:
            return False
        if value.graph is self._ctx.root.graph:
            return True
        handed = [call.operands() for call in self._scopes[value.graph].calls]
        return bool(handed) and all(
            x is not None and at < len(x) and isinstance(x[at], Node) and self._is_input(x[at])
            for x in handed
        )

    def _inputs_of(self, graph: Graph) -> dict[int | None, int]:
        """The number of the input that a storage is."""
        if graph not in self._inputs:
            inputs = self._scopes[graph].placeholders()
            self._inputs[graph] = {storage(x): i for i, x in reversed([*enumerate(inputs)])}
            self._inputs[graph].pop(None, None)  # of what is no tensor
        return self._inputs[graph]
