"""The nodes of a norm and the quantizations behind it: what lies between, and who else reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.effects import written_arguments
from compile_ext.passes.norm_quantize.expression import Expr
from compile_ext.passes.norm_quantize.nodes import NodeExpressions, holds_tensors
from compile_ext.passes.norm_quantize.patterns import Norm, Quantization
from compile_ext.passes.readers import is_empty
from compile_ext.passes.values import fake, storage, tensor


class Writers:
    """The nodes of a graph that write, each with the storages that it writes."""

    def __init__(self, graph: Graph, ctx: PassContext) -> None:
        self.by_bodies = ctx.written_by_bodies(graph)
        written = ((node, written_arguments(node)) for node in graph.nodes)
        self.nodes = [(node, {storage(x) for x in args}) for node, args in written if args]


@dataclass(eq=False)
class Region:
    """
    Args:
        casts: the nodes that make q float8; several, where several linears quantize their input.
        inner: what is computed between the norm's inputs and the results.
        results: the nodes that hold q or the scale, views, copies and filled buffers among them.
        reads: the norm's inputs, with the casts and copies that lie before them.
        x, weight: those that the op is to read: the first that holds the numbers.
    """

    casts: Sequence[Node]
    exprs: NodeExpressions
    quantization: Quantization
    norm: Norm
    q: Expr
    inner: set[Node] = field(default_factory=set)
    results: dict[Node, Expr] = field(default_factory=dict)
    reads: set[Node] = field(default_factory=set)
    x: Node = field(init=False)
    weight: Node | None = None

    def nodes(self) -> list[Node]:
        return sorted({*self.inner, *self.results})

    def computed(self) -> list[Node]:
        """Without the buffers, which may be allocated anywhere before."""
        return [x for x in self.nodes() if not is_empty(x)]

    def ends(self) -> list[Node]:
        """The results that something else reads."""
        inside = {*self.inner, *self.results}
        return [x for x in sorted(self.results) if any(u not in inside for u in x.users)]

    def why_not_alone(self) -> str | None:
        """Who else reads what is computed in between."""
        inside = {*self.inner, *self.results}
        for node in sorted(self.inner):
            for user in node.users:
                if user not in inside and not self._is_own_size(user):
                    return f"{user.name} reads {self._name(node)}"
        return None

    def _is_own_size(self, node: Node) -> bool:
        """A size that nothing but the quantization takes, for its views."""
        inside = {*self.inner, *self.results}
        is_size = isinstance(fake(node), (int, torch.SymInt))
        return is_size and all(u in inside for u in node.users)

    def _name(self, node: Node) -> str:
        expr = self.exprs.of(node)
        if expr is self.quantization.y:
            return "the normed activation"
        in_norm = expr in set(self.quantization.y.inside())
        return f"a value inside the {'norm' if in_norm else 'quantization'}"

    def why_not_unwritten(self, writers: Writers, since: Node | None = None) -> str | None:
        """Whether the graph writes a result, or what the norm reads, while it reads it or ``since``
        another node."""
        # A leaf stands for what it holds in this time, whatever was written before.
        computed = [x for x in self.reads if not self.exprs.is_leaf(x)]
        first = min([*self.computed(), *computed, *([since] if since else [])])
        at_reads = {storage(x) for x in self.reads}
        own = {storage(x) for x in self.nodes()} - at_reads
        last = self.nodes()[-1]
        if (own | at_reads) & writers.by_bodies:
            return "a body of a higher-order op writes what it reads or gives"
        for node, written in writers.nodes:
            if node._erased:
                continue
            if node not in self.results and written & own:
                return f"{node.name} writes what it computes"
            if written & at_reads and first < node < last:
                return f"{node.name} writes what the norm reads"
        return None


def find_region(
    casts: Sequence[Node], quantization: Quantization, norm: Norm, exprs: NodeExpressions
) -> Region:
    q = exprs.of(casts[0])
    region = Region(casts, exprs, quantization, norm, q)
    outside = {*norm.x.inside(), *(norm.weight.inside() if norm.weight else ())}
    parts = set(q.inside()) - outside
    kinds = {q: torch.float8_e4m3fn, quantization.scale: torch.float32}
    todo = list(casts)
    while todo:
        node = todo.pop()
        if node in region.inner or node in region.results:
            continue
        expr = exprs.of(node)
        if expr in outside or not any(isinstance(x, Expr) for x in expr.args):
            region.reads |= _with_origins(node, exprs)  # x, the weight, a number
            continue
        if expr in kinds:
            region.results[node] = expr
        else:
            region.inner.add(node)
        todo += filter(holds_tensors, node.all_input_nodes)
        for user in filter(holds_tensors, node.users):
            held, found = exprs.of(user), tensor(user)
            # q.float() holds the numbers of q, and is no q.
            if held in parts and (found is None or kinds.get(held, found.dtype) == found.dtype):
                todo.append(user)
    region.x = min(x for x in region.reads if exprs.of(x) is norm.x)
    if norm.weight is not None:
        region.weight = min(x for x in region.reads if exprs.of(x) is norm.weight)
    return region


def _with_origins(node: Node, exprs: NodeExpressions) -> set[Node]:
    """A node and what it is computed from, up to the leaves of its expression: a write to any of
    these may part what is one expression."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo += [] if exprs.is_leaf(at) else filter(holds_tensors, at.all_input_nodes)
    return found
