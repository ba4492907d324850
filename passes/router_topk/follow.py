"""What the nodes behind a router's logits hold, followed through the graph in its order."""

from __future__ import annotations

import heapq
import operator
from dataclasses import dataclass, field

from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.effects import written_arguments
from compile_ext.passes.expressions.arithmetic import Arithmetic
from compile_ext.passes.expressions.expression import Expr, Table
from compile_ext.passes.expressions.trace import evaluate
from compile_ext.passes.expressions.traces import Traces
from compile_ext.passes.readers import is_fill, weight_source
from compile_ext.passes.router_topk.choice_rules import apply_choice_rule
from compile_ext.passes.values import dtype_name, storage, tensor


@dataclass(eq=False)
class Followed:
    """What is computed from a router's logits, inputs of the graph and numbers, and nothing else.

    Args:
        router: the node of the logits.
        logits: their expression, a leaf.
        exprs: what each node holds as it is computed, in the graph's order.
        writes: of each of them that writes another in place, that one.
    """

    router: Node
    logits: Expr
    exprs: dict[Node, Expr] = field(default_factory=dict)
    writes: dict[Node, Node] = field(default_factory=dict)


def follow(router: Node, traces: Traces, ctx: PassContext) -> Followed:
    """Nodes that no rule knows are left out, and what is behind them."""
    return _Follower(router, traces, ctx).run()


class _Follower:
    def __init__(self, router: Node, traces: Traces, ctx: PassContext) -> None:
        self._router, self._traces, self._ctx = router, traces, ctx
        self._table = Table()
        self._make = Arithmetic(self._table)
        self.found = Followed(router, self._leaf(router))
        # What nodes hold at this point of the graph; None: something that is not known.
        self._now: dict[Node, Expr | None] = {router: self.found.logits}

    def run(self) -> Followed:
        todo, seen = list(self._router.users), {self._router}
        heapq.heapify(todo)  # nodes are ordered as they stand in the graph
        while todo:
            node = heapq.heappop(todo)
            if node in seen:
                continue
            seen.add(node)
            expr = self._compute(node)
            behind = [] if expr is None else [node]
            for x in written_arguments(node):
                self._write(x, expr)
                if expr is not None:
                    self.found.writes[node] = x
                    behind.append(x)
            if expr is not None:
                self.found.exprs[node] = self._now[node] = expr
            for user in (u for x in behind for u in x.users):
                heapq.heappush(todo, user)
        return self.found

    def _write(self, written: Node, expr: Expr | None) -> None:
        """Views of what is written hold something else from now on."""
        at = storage(written)
        for x in self._now:
            if storage(x) == at:
                self._now[x] = None
        self._now[written] = expr

    def _compute(self, node: Node) -> Expr | None:
        if not node.op.startswith("call_"):
            return None
        if node.target is operator.getitem and tensor(node.args[0]) is None:
            pair = self._now.get(node.args[0])  # type: ignore[arg-type]
            if pair is None:
                return None
            return pair if node.args[1] == 0 else self._table("top_ids", *pair.args)
        written = written_arguments(node)
        if written and tuple(written) != node.args[:1]:
            return None
        return self._evaluated(node, node)

    def _evaluated(self, node: Node, at: Node) -> Expr | None:
        """What a call gives for what its inputs hold when ``at`` runs."""
        inputs = [self._held(x, at) for x in node.all_input_nodes if tensor(x) is not None]
        trace = self._traces.of(node) if None not in inputs else None
        if trace is None or not trace.is_clear or trace.result is None:
            return None
        return evaluate(trace, inputs, self._make, apply_choice_rule)[trace.result.at]

    def _held(self, x: Node, at: Node) -> Expr | None:
        """Of a node behind the logits, of an input of the graph in any form, or of a fill."""
        if x in self._now:
            return self._now[x]
        is_first = not self._ctx.is_written(x) or all(not user < at for user in x.users)
        if x.op == "placeholder":
            return self._leaf(x) if not self._ctx.is_written(x) else None
        if (is_fill(x) and is_first) or weight_source(x) is not None:
            return self._evaluated(x, at)
        return None

    def _leaf(self, node: Node) -> Expr:
        found = tensor(node)
        return self._table("leaf", node, "" if found is None else dtype_name(found))
