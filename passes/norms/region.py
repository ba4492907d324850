"""The nodes of a norm and what belongs to it: what lies between, and who else reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.effects import written_arguments
from compile_ext.passes.expressions.expression import Expr, InputNumber
from compile_ext.passes.expressions.nodes import NodeExpressions, holds_tensors
from compile_ext.passes.norms.patterns import Norm
from compile_ext.passes.readers import is_empty
from compile_ext.passes.values import dtype_name, fake, same_size, storage, tensor


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
        starts: the nodes where the search for the others began, each with a result.
        inputs: what the op is to read, by the names of its arguments.
        kinds: what the op is to give, with its dtypes.
        parts: what is computed in between, innermost first, by the names that people know.
        numbers: those that were compared and are inputs of the graph.
        inner: the nodes between the inputs and the results.
        results: the nodes that hold a result, views, copies and filled buffers among them.
        reads: the inputs, with the casts and copies that lie before them.
        nodes_of: for each input the node to read: the first that holds the numbers.
    """

    starts: Sequence[Node]
    exprs: NodeExpressions
    norm: Norm
    inputs: Mapping[str, Expr]
    kinds: Mapping[Expr, torch.dtype]
    parts: Mapping[str, Expr]
    numbers: Sequence[InputNumber]
    inner: set[Node] = field(default_factory=set)
    results: dict[Node, Expr] = field(default_factory=dict)
    reads: set[Node] = field(default_factory=set)
    nodes_of: dict[str, Node] = field(default_factory=dict)

    @property
    def weight(self) -> Node | None:
        return self.nodes_of.get("weight")

    def follow(self, replaced: Mapping[Node, Node]) -> None:
        """Read what came in the place of the nodes that it reads, since it was found."""

        def latest(node: Node) -> Node:
            while node in replaced:
                node = replaced[node]
            return node

        self.nodes_of.update({name: latest(x) for name, x in self.nodes_of.items()})
        self.reads = {latest(x) for x in self.reads}

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
        if expr is self.norm.y:
            return "the normed activation"
        part = next(name for name, whole in self.parts.items() if expr in set(whole.inside()))
        return f"a value inside the {part}"

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
    starts: Sequence[Node],
    exprs: NodeExpressions,
    norm: Norm,
    inputs: Mapping[str, Expr],
    kinds: Mapping[Expr, torch.dtype],
    parts: Mapping[str, Expr],
    numbers: Sequence[InputNumber],
) -> Region:
    region = Region(starts, exprs, norm, inputs, kinds, parts, numbers)
    outside = {x for whole in inputs.values() for x in whole.inside()}
    inside = {x for whole in parts.values() for x in whole.inside()} - outside
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in region.inner or node in region.results:
            continue
        expr = exprs.of(node)
        if expr in outside or not any(isinstance(x, Expr) for x in expr.args):
            region.reads |= with_origins(node, exprs)  # an input, a number
            continue
        if expr in kinds:
            region.results[node] = expr
        else:
            region.inner.add(node)
        todo += filter(holds_tensors, node.all_input_nodes)
        for user in filter(holds_tensors, node.users):
            held, found = exprs.of(user), tensor(user)
            # q.float() holds the numbers of q, and is no q.
            if held in inside and (found is None or kinds.get(held, found.dtype) == found.dtype):
                todo.append(user)
    for name, expr in inputs.items():
        region.nodes_of[name] = min(x for x in region.reads if exprs.of(x) is expr)
    return region


def with_origins(node: Node, exprs: NodeExpressions) -> set[Node]:
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


def why_unfit(region: Region, out: Tensor) -> str | None:
    """Why an op does not take the norm's inputs for a result of the form of ``out``."""
    norm, x, weight = region.norm, tensor(region.nodes_of["x"]), tensor(region.weight)
    assert x is not None
    if x.dtype != norm.dtype:
        return f"x is {dtype_name(x)}, the normed activation {dtype_name(norm.dtype)}"
    if weight is not None and not (weight.numel() == weight.shape[-1] == norm.k):
        return f"its weight is {list(weight.shape)}, not [{norm.k}]"
    if any(t is not None and t.device != out.device for t in (x, weight)):
        return "x, the weight and the result are on different devices"
    if not same_size(x.numel(), out.numel()):
        return "x is repeated before it is normed"
    return None
