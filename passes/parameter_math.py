"""Which nodes of a graph compute from parameters or from nothing, and what a result needs.

The unit is a storage: a tensor that parameter nodes allocate, the writes into it (``buf[:n] = w``)
and its views together. Its *program* is the list of nodes that fill it, in graph order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.dead_code import erase_writes
from compile_ext.passes.derivation import Derivation, Step, after, derivation_of
from compile_ext.passes.effects import is_plain_write, written_arguments
from compile_ext.passes.purity import aten_ops, cannot_fail, is_pure
from compile_ext.passes.readers import is_empty, is_fill, read_pad
from compile_ext.passes.values import fake, is_static, storage, tensor


@dataclass(frozen=True)
class Result:
    """A tensor that is computed from parameters alone.

    Args:
        node: the node that allocates it; of a view (``of_view``), the view.
        nodes: what computes it, in graph order, itself and the writes into it included.
        writes: those of ``nodes`` that write into it.
        sources: the parameters, in the order of the graph's placeholders.
        readers: nodes outside of ``nodes`` that read it or a view of it.
    """

    node: Node
    nodes: list[Node]
    writes: list[Node]
    sources: list[Node]
    readers: list[Node]

    def derivation(self, then: Step | None = None) -> Derivation:
        """What computes it, and ``then`` of that."""
        if then is not None and not self.nodes:
            return then
        first = derivation_of(self.nodes, self.sources, self.node)
        return after(first, then) if then is not None else first

    def why_not_derivable(self, ctx: PassContext) -> str | None:
        """Why no constant can be made of it, or None."""
        reasons = [ctx.stand_back(x) for x in self.nodes]
        reasons += [ctx.why_not_derivable(x) for x in self.sources]
        if not self.sources:
            reasons.append(ctx.why_no_input(self.node.graph))
        if ctx.is_branch(self.node.graph) and self._can_fail(ctx):
            reasons.append("it is in a branch that may not be taken, and can fail")
        return next((r for r in reasons if r), None)

    def _can_fail(self, ctx: PassContext) -> bool:
        """Whether it depends on the values if this can be computed."""
        computed = [x for x in self.nodes if not is_fill(x) and not is_empty(x)]
        return not all(cannot_fail(aten_ops(x, ctx.scopes) or []) for x in computed)

    @property
    def nbytes(self) -> int:
        found = tensor(self.node)
        assert found is not None
        return int(found.numel()) * found.element_size()


class ParameterMath:
    """The parameter nodes of one graph: what computes from parameters, or from nothing, alone."""

    def __init__(self, graph: Graph, ctx: PassContext) -> None:
        self._ctx = ctx
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._nodes: set[Node] = set()
        self._of_storage: dict[int, list[Node]] = {}
        for node in self._order:
            if self._belongs(node):
                self._nodes.add(node)
                at = storage(node)
                if at is not None:
                    self._of_storage.setdefault(at, []).append(node)
        outside = [n for n in self._order if n not in self._nodes]
        self._written_outside = {storage(x) for n in outside for x in written_arguments(n)}
        self._written_outside |= ctx.written_by_bodies(graph)

    def _belongs(self, node: Node) -> bool:
        if node.op == "placeholder":
            # Behind a higher-order op that is not known here, nobody can tell: the reason says so.
            return self._ctx.is_parameter(node) or not self._ctx.root_inputs(node)
        if not all(x in self._nodes for x in _inputs(node)):
            return False
        written = written_arguments(node)
        if written:
            return is_plain_write(node) and all(self._is_made_here(x) for x in written)
        if not _is_value(fake(node)):
            return False
        ops = aten_ops(node, self._ctx.scopes)
        return ops is not None and is_pure(ops)

    def _sharing(self, node: Node) -> list[Node]:
        """The parameter nodes that live in the storage of ``node``."""
        at = storage(node)
        return [] if at is None else self._of_storage.get(at, [])

    def _is_made_here(self, node: Node) -> bool:
        made = self._sharing(node)
        return bool(made) and made[0].op != "placeholder"

    def result(self, node: Node) -> Result | None:
        """The tensor that ``node`` is or views, if parameter nodes allocate it."""
        at = storage(node) if node in self._nodes else None
        if at is None or self._of_storage[at][0].op == "placeholder":
            return None
        return self._result(self._of_storage[at][0], self._writers(at))

    def _result(self, node: Node, writes: list[Node]) -> Result:
        nodes = sorted(self._needs([node, *writes]), key=self._order.__getitem__)
        inside = set(nodes)
        views = self._sharing(node)
        readers = [user for x in views for user in x.users if user not in inside]
        sources = [x for x in nodes if x.op == "placeholder"]
        return Result(node, [x for x in nodes if x not in sources], writes, sources, readers)

    def results(self) -> list[Result]:
        """All that something else than parameter nodes reads, computed from a parameter; and the
        pads of what may be one."""
        found = [self.result(nodes[0]) for nodes in self._of_storage.values()]
        return [r for r in found if r is not None and r.sources and self._is_wanted(r)]

    def constants(self) -> list[Result]:
        """All that is computed from nothing but numbers in the model's code."""
        found = [self.result(nodes[0]) for nodes in self._of_storage.values()]
        return [r for r in found if r is not None and not r.sources]

    def readers(self, result: Result) -> list[Node]:
        """The readers of a result that are no views of it: those of its views, of symbolic size
        too, in their place."""
        found: dict[Node, None] = {}
        todo = list(result.readers)
        while todo:
            reader = todo.pop(0)
            if _is_view_of(reader, result.node) and not written_arguments(reader):
                todo += reader.users
            else:
                found[reader] = None
        return list(found)

    def _is_wanted(self, result: Result) -> bool:
        if all(map(self._ctx.is_parameter, result.sources)):
            return any(user not in self._nodes for user in result.readers)
        return read_pad(result.node) is not None

    def why_not(self, result: Result) -> str | None:
        """Why the value that its readers see is not that of its program, or None."""
        if any(storage(x) in self._written_outside for x in result.nodes):
            return "the graph writes the result"
        last = max((self._order[x] for x in result.writes), default=-1)
        views = self._sharing(result.node)
        for reader in (user for x in views for user in x.users):
            is_part = reader in result.writes or _is_view_of(reader, result.node)
            if not is_part and self._order.get(reader, last) < last:
                return "it is read before it is complete"
        return None

    def knows(self, node: Node) -> bool:
        """Whether the graph is as it was, as far as this node is concerned."""
        stack = [node]
        while stack:
            x = stack.pop()
            if x not in self._order:
                return False
            stack += x.all_input_nodes
        return True

    def of_view(self, node: Node) -> Result | None:
        """A view of a parameter or of a result, with all that computes it."""
        if node not in self._nodes or tensor(node) is None:
            return None
        whole = self.result(node)
        found = self._result(node, [] if whole is None else whole.writes)
        return found if found.sources else None

    def _writers(self, at: int) -> list[Node]:
        views = self._of_storage.get(at, [])
        users = [u for x in views for u in x.users if u in self._nodes]
        return [u for u in users if any(storage(w) == at for w in written_arguments(u))]

    def _needs(self, ends: list[Node]) -> set[Node]:
        """The nodes that these need, with the earlier writes into what they read."""
        needed: set[Node] = set()
        stack = list(ends)
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            inputs = _inputs(node)
            stack += inputs
            for at in {storage(x) for x in inputs}:
                if at is not None:
                    stack += [w for w in self._writers(at) if self._order[w] < self._order[node]]
        return needed


def _inputs(node: Node) -> list[Node]:
    """What a node computes with. What ``x.new_ones(1)`` is like lends its form alone."""
    return [] if is_fill(node) or is_empty(node) else node.all_input_nodes


def _is_view_of(node: Node, base: Node) -> bool:
    """Whether a node is a view of a tensor, or a tuple of views (``w.chunk(2)``)."""
    value = fake(node)
    leaves = value if isinstance(value, (tuple, list)) else (value,)
    return bool(leaves) and all(storage(x) == storage(base) for x in leaves)


def _is_value(value: Any) -> bool:
    """Tensors of static size, or a tuple of them (``w.chunk(2)``)."""
    leaves = value if isinstance(value, (tuple, list)) else (value,)
    return bool(leaves) and all(
        isinstance(x, Tensor) and x.layout == torch.strided and all(map(is_static, x.shape))
        for x in leaves
    )


def put_constants(folded: list[tuple[Result, Derivation]], ctx: PassContext) -> None:
    """Put a constant, what its derivation gives, in the place of each result. The derivations are
    of the graph as it was before the first: one result may need the nodes of another."""
    for result, how in folded:
        new = ctx.derive(result.node.graph, tuple(result.sources), how)
        erase_writes(result.writes)
        ctx.replace(result.node, new)
    ctx.erase_dead(x for result, _ in folded for x in result.nodes)


class LazyParameterMath:
    """The parameter nodes of a graph that changes; most graphs never ask."""

    def __init__(self, graph: Graph, ctx: PassContext) -> None:
        self._graph, self._ctx = graph, ctx
        self._math: ParameterMath | None = None

    def of_view(self, node: Node) -> tuple[Result, str | None] | None:
        """What computes a node from parameters alone, and why it may not be a constant."""
        if self._math is None or not self._math.knows(node):
            self._math = ParameterMath(self._graph, self._ctx)
        found = self._math.of_view(node)
        if found is None:
            return None
        return found, found.why_not_derivable(self._ctx) or self._math.why_not(found)
