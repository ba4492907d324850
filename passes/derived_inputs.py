"""Extra inputs of the rewritten graph: each stands for a derivation of parameters, or for a
constant that comes from none.

In the body of a higher-order op the extra input is an operand that every caller hands in, down from
the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from compile_ext.passes import derivation
from compile_ext.passes.derivation import Derivation, Step
from compile_ext.passes.scopes import Scope
from compile_ext.passes.values import DERIVED, fake, fake_mode

_NAME = "compile_ext_derived_"
Sources = tuple[Node, ...]


@dataclass(frozen=True)
class DerivedInput:
    """An extra input of the root graph: ``derivation`` of the root inputs ``sources``, which may be
    none.
    """

    sources: tuple[int, ...]
    derivation: Derivation


@dataclass(frozen=True)
class _Origin:
    graph: Graph
    sources: Sources
    how: Derivation


class DerivedInputs:
    """All extra inputs of one compilation."""

    def __init__(self, scopes: Sequence[Scope]) -> None:
        self._scopes = scopes
        self._scope_of: dict[Graph, Scope] = {s.graph: s for s in scopes}
        self._made: dict[_Origin, Node] = {}
        self._origins: dict[Node, _Origin] = {}
        self._fakes: dict[tuple[Sources, Derivation], Tensor] = {}
        self._count = 0

    def __contains__(self, node: Node) -> bool:
        return node in self._origins

    def sources(self, node: Node) -> Sources:
        """The placeholders that a derived one comes from; any other node comes from itself."""
        return self._origins[node].sources if node in self._origins else (node,)

    def origin(self, node: Node) -> tuple[Sources, Derivation]:
        """What a derived placeholder comes from, and how."""
        return self._origins[node].sources, self._origins[node].how

    def derive(self, graph: Graph, sources: Sources, how: Derivation) -> Node:
        """The placeholder of this graph for ``how(*sources)``. A constant of a constant hangs on
        the parameters as well."""
        if len(sources) == 1 and sources[0] in self._origins:
            assert isinstance(how, Step)
            first = self._origins[sources[0]]
            how, sources = derivation.after(first.how, how), first.sources
        return self._derive(_Origin(graph, sources, how))

    def _derive(self, origin: _Origin) -> Node:
        if origin not in self._made:
            scope = self._scope_of[origin.graph]
            if scope is self._scopes[0]:
                self._add(scope, origin)
            else:
                self._add_in_body(scope, origin)
        return self._made[origin]

    def _add(self, scope: Scope, origin: _Origin) -> Node:
        name = f"{_NAME}{self._count}"
        self._count += 1
        # Loads all of Dynamo: not at import time.
        from torch._dynamo.source import EphemeralSource

        new = scope.add_placeholder(name, self._meta(origin))
        if scope is self._scopes[0]:
            new._dynamo_source = EphemeralSource(name)
        self._made[origin], self._origins[new] = new, origin
        return new

    def _add_in_body(self, scope: Scope, origin: _Origin) -> None:
        at = [scope.placeholders().index(x) for x in origin.sources]
        for call in scope.calls:
            operands = call.operands()
            assert operands is not None  # why_not_derivable saw to it
            sources = tuple(operands[i] for i in at)
            call.append(self._derive(_Origin(call.parent.graph, sources, origin.how)))
        bodies = [scope, *(b for c in scope.calls for b in c.bodies if b is not scope)]
        for body in dict.fromkeys(bodies):
            # The other branches of a cond find it there: a second operand would be the same tensor.
            placeholders = body.placeholders()
            sources = tuple(placeholders[i] for i in at)
            self._add(body, _Origin(body.graph, sources, origin.how))

    def _meta(self, origin: _Origin) -> dict[str, Any]:
        return {
            "example_value": self.compute(origin.sources, origin.how),
            "tensor_dict": {"_dynamo_static_input_type": "unguarded"},
            DERIVED: str(origin.how),
        }

    def compute(self, sources: Sources, how: Derivation) -> Tensor:
        """The fake of ``how(*sources)``."""
        found = self._fakes.get((sources, how))  # asked for its size first, then for itself: 2 ms
        if found is None:
            with torch.no_grad(), fake_mode(self._scopes):
                found = self._fakes[sources, how] = how(*map(fake, sources))
        return found

    def drop_unused(self) -> None:
        """A weight padded by hand, then to an alignment, leaves the first constant unread."""
        for node in self._of_root():
            if not node.users:
                self._made.pop(self._origins.pop(node))
                node.graph.erase_node(node)

    def inputs(self) -> list[DerivedInput]:
        """The extra inputs of the root graph, in the order of its placeholders."""
        at = {x: i for i, x in enumerate(self._scopes[0].placeholders())}
        origins = [self._origins[x] for x in self._of_root()]
        return [DerivedInput(tuple(at[x] for x in o.sources), o.how) for o in origins]

    def fakes(self) -> list[Any]:
        """Their fakes, in the same order."""
        return [fake(x) for x in self._of_root()]

    def _of_root(self) -> list[Node]:
        return [x for x in self._scopes[0].placeholders() if x in self._origins]
