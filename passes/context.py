"""What a pass gets beside the graph: the inputs, the report, and the ways to change a graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from compile_ext.passes import derivation
from compile_ext.passes.budget import Budget
from compile_ext.passes.dead_code import erase_dead
from compile_ext.passes.derivation import Derivation
from compile_ext.passes.derived_inputs import DerivedInputs, Sources
from compile_ext.passes.effects import (
    leaving_storages,
    written_operands,
    written_storages,
)
from compile_ext.passes.op_calls import FUNCTIONALIZED, OpCall
from compile_ext.passes.readers import op_name, weight_source
from compile_ext.passes.report import Decision, Entry, GraphReport
from compile_ext.passes.scopes import Scope, find_scopes
from compile_ext.passes.values import call_on_fakes, fake_mode, fakes, storage

# Meta key of a node: why the passes must leave it alone (set before the first pass, see
# `regions.py`).
STAND_BACK = "compile_ext_stand_back"


@dataclass(eq=False)
class PassContext:
    """Shared by all passes of one compilation.

    Args:
        root: the copied graph module.
        inputs: its real inputs, parameters among them, in placeholder order.
        memory_budget: bytes for derived constants, None for the default (see ``budget.py``).
        cost: ``(derivation, parameter, bytes of the result) -> bytes`` that a constant takes.
        poison: what an op does not read is NaN (``compile_ext.poison``).
        kernels: for an op, by its name without the namespace, the kernel that its calls name.
        batch_invariant: no rewrite may depend on M (``compile_ext.batch_invariant``).
        why_no_pdl: why no kernel may be launched before the one in front has ended, or None.
        bf16_router: a router in float32 may multiply bfloat16 (``compile_ext.bf16_router``).
        marked: positions of the inputs that the user has marked as weights of routers.
        pass_name: the pass that runs; the pipeline sets it.
    """

    root: GraphModule
    inputs: Sequence[Any]
    memory_budget: int | None = None
    cost: Callable[[Derivation, Tensor, int], int] = lambda how, p, nbytes: nbytes
    poison: bool = False
    kernels: Mapping[str, str] = field(default_factory=dict)
    batch_invariant: bool = False
    why_no_pdl: str | None = None
    bf16_router: bool = False
    marked: frozenset[int] = frozenset()
    report: GraphReport = field(default_factory=GraphReport)
    # For compile_ext.check: new node -> the node of the original graph that it stands for, and the
    # nodes that hold something else under their old name.
    replaced: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    pass_name: str = ""

    def __post_init__(self) -> None:
        self.scopes = find_scopes(self.root)
        self._scope_of: dict[Graph, Scope] = {s.graph: s for s in self.scopes}
        self._root_inputs = {n: i for i, n in enumerate(self.scopes[0].placeholders())}
        self.derived = DerivedInputs(self.scopes)
        self.budget = Budget(self.memory_budget, self._weight_bytes())
        self._written = written_storages(self.scopes)
        self._leaving = leaving_storages(self.scopes)

    # ---- say -------------------------------------------------------------------------------------

    def fired(self, node: Node, detail: str) -> None:
        self._decide(node, True, detail)

    def skipped(self, node: Node, reason: str) -> None:
        self._decide(node, False, reason)

    def _decide(self, node: Node, fired: bool, detail: str) -> None:
        decision = Decision(self.pass_name, fired, detail)
        decisions = self.entry(node).decisions
        if decision not in decisions:
            decisions.append(decision)

    def entry(self, node: Node, weight: Any = None) -> Entry:
        """The report's entry of a candidate, or of a parameter; ``weight`` names it (default: the
        node's first parameter).
        """
        weight = node if node.op == "placeholder" else weight
        roots = self.root_inputs(weight) if weight is not None else ()
        if not roots:
            roots = next((r for a in node.all_input_nodes if (r := self._static_roots(a))), ())
        target = node.args[0] if node.target in FUNCTIONALIZED else node.target
        op = "parameter" if node.op == "placeholder" else op_name(target)
        return self.report.entry(node, op, roots, module_hint(node))

    def _static_roots(self, node: Node) -> tuple[int, ...]:
        roots = self.root_inputs(node)
        return roots if roots and all(self.is_static(i) for i in roots) else ()

    # ---- ask -------------------------------------------------------------------------------------

    def stand_back(self, node: Node) -> str | None:
        """Why no pass may rewrite this node: autocast, or a gradient (see ``regions.py``)."""
        reason: str | None = node.meta.get(STAND_BACK)
        return reason

    def root_inputs(self, value: Any) -> tuple[int, ...]:
        """Positions, among the root's inputs, of the tensors that a weight argument comes from."""
        source = weight_source(value)
        if source is None:
            return ()
        if source in self.derived:
            found = [i for x in self.derived.sources(source) for i in self.root_inputs(x)]
            return tuple(dict.fromkeys(found))
        if source in self._root_inputs:
            return (self._root_inputs[source],)
        scope = self._scope_of.get(source.graph)
        if scope is None or source not in (placeholders := scope.placeholders()):
            return ()
        at = placeholders.index(source)
        found = []
        for call in scope.calls:
            operands = call.operands()
            if operands is not None and at < len(operands):
                found += self.root_inputs(operands[at])
        return tuple(dict.fromkeys(found))

    def is_activation(self, node: Node) -> bool:
        """An input of the call, or a tensor whose origin is one as far as it can be seen."""
        roots = self.root_inputs(node)
        return bool(roots) and not all(self.is_static(i) for i in roots)

    def _root(self, index: int) -> Node:
        return self.scopes[0].placeholders()[index]

    def written_by_bodies(self, graph: Graph) -> set[int | None]:
        """Storages of this graph that the bodies of its higher-order ops write."""
        return {
            storage(operand)
            for scope in self.scopes
            for call in scope.calls
            if call.node.graph is graph
            for operand in written_operands(scope, call, self._written)
        }

    def is_written(self, node: Node) -> bool:
        """Whether a node of this compilation writes the storage of ``node``, or of what it stands
        for.
        """
        if storage(node) in self._written:
            return True
        return any(storage(self._root(i)) in self._written for i in self.root_inputs(node))

    def is_branch(self, graph: Graph) -> bool:
        """Whether a graph is the body of an op that runs one body or another."""
        return any(call.name == "cond" for call in self._scope_of[graph].calls)

    def is_leaving(self, node: Node) -> bool:
        """Whether the graph hands out the storage of ``node``."""
        return storage(node) in self._leaving

    def charge(self, *wanted: tuple[Sources, Derivation]) -> str | None:
        """Take the memory for these constants from the budget; or say why not."""
        costs: dict[object, int] = {}
        for sources, how in wanted:
            if sources and self.budget.is_free(how):
                continue
            result = self.derived.compute(sources, how)
            nbytes = result.numel() * result.element_size()
            if not sources and self.budget.is_small(nbytes):
                continue
            roots = tuple(self.root_inputs(x) for x in sources)
            # Both branches of a cond share one constant; each caller of a body has its own.
            each = [self.cost(how, self.inputs[i], nbytes) for i in roots[0]] if roots else [nbytes]
            costs[roots, how] = sum(each)
        return self.budget.charge(costs)

    def why_not_derivable(self, node: Any) -> str | None:
        """Why no constant can be derived from this node, or None."""
        if not isinstance(node, Node) or node.op != "placeholder":
            return "it is computed in the graph, not a parameter or buffer"
        if node in self.derived:
            return None  # its sources were looked at when it was made
        if node not in self._root_inputs:
            return self._why_not_through_calls(node)
        index = self._root_inputs[node]
        if not self.is_static(index):
            return "it is an input of the call, not a parameter or buffer"
        if self.is_written(node):
            return "the graph writes it"
        return derivation.why_not(self.inputs[index])

    def why_no_input(self, graph: Graph) -> str | None:
        """Why a graph takes no further input, or None."""
        scope = self._scope_of[graph]
        for call in scope.calls:
            if call.operands() is None:
                return f"it is inside {call.name}, which takes no further operand"
            if any(len(b.calls) > 1 for b in call.bodies) and len(call.bodies) > 1:
                return f"a body of {call.name} is shared with another call"
            reason = self.why_no_input(call.parent.graph)
            if reason:
                return reason
        return None if scope.calls or scope is self.scopes[0] else "nothing calls its graph"

    def _why_not_through_calls(self, node: Node) -> str | None:
        scope = self._scope_of[node.graph]
        at = scope.placeholders().index(node)
        reason = self.why_no_input(node.graph)
        for call in scope.calls if reason is None else ():
            operands = call.operands() or ()
            if at >= len(operands):
                return f"{call.name} does not hand it in as an operand"
            reason = reason or self.why_not_derivable(operands[at])
        return reason

    def is_parameter(self, node: Node) -> bool:
        """Whether a node is a parameter or buffer itself, no view of it and nothing computed from
        it.
        """
        return node.op == "placeholder" and bool(self._static_roots(node))

    def is_static(self, index: int) -> bool:
        """Whether a root input is a parameter or buffer, and no input of the call."""
        meta = self._root(index).meta
        return bool((meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))

    def _weight_bytes(self) -> int:
        weights = [self.inputs[i] for i in self._root_inputs.values() if self.is_static(i)]
        return sum(x.numel() * x.element_size() for x in weights if isinstance(x, Tensor))

    # ---- change ----------------------------------------------------------------------------------

    def insert(
        self,
        before: Node,
        target: Callable[..., Any] | str,
        *args: Any,
        like: Node | None = None,
        **kwargs: Any,
    ) -> Node:
        """A new node in front of ``before``, with its fake result; ``like`` lends it its origin."""
        node = self.insert_bare(before, target, args, kwargs, like or before)
        self.update_fake(node)
        return node

    def insert_bare(
        self, before: Node, target: Callable[..., Any] | str, args: Any, kwargs: Any, like: Node
    ) -> Node:
        """The same without a fake, for a caller that has one."""
        graph = before.graph
        with graph.inserting_before(before):
            if isinstance(target, str):
                node = graph.call_method(target, args, kwargs)
            else:
                node = graph.call_function(target, args, kwargs)
        keep = ("nn_module_stack", "stack_trace", "source_fn_stack", STAND_BACK)
        node.meta.update({k: like.meta[k] for k in keep if k in like.meta})
        return node

    def rewrite(self, call: OpCall, changes: dict[str, Any], op: OpOverload | None = None) -> None:
        """Give a call other arguments, or another op of the same schema; what only it has read
        goes. Where the result gets another form, ``update_fake`` is the caller's to call: it takes
        1 ms.
        """
        before = call.node.all_input_nodes
        call.rewrite(changes, op)
        self.erase_dead(before)

    def update_fake(self, node: Node) -> None:
        """Compute what a new or changed node stands for."""
        args, kwargs = fakes(node.args), fakes(node.kwargs)
        node.meta["example_value"] = call_on_fakes(node, args, kwargs, fake_mode(self.scopes))

    def replace(self, old: Node, new: Node) -> None:
        """Put ``new`` in the place of ``old`` for all its readers; ``old`` and what it alone read
        go.
        """
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.report.moved(old, new)
        self._note_origin(new, old)
        before = old.all_input_nodes
        if not old.users and not old._erased:
            old.graph.erase_node(old)
        self.erase_dead(before)

    def stands_for(self, new: Node, old: Node) -> None:
        """``new`` now holds what ``old`` held in the original graph (``old`` stays, for another
        use).
        """
        self._note_origin(new, old)
        if old.graph is self.root.graph:
            self.changed.add(old.name)

    def _note_origin(self, new: Node, old: Node) -> None:
        if old.graph is self.root.graph:  # compile_ext.check compares the root graph, node by node
            self.replaced.setdefault(new.name, self.replaced.get(old.name, old.name))

    def erase_dead(self, nodes: Iterable[Node]) -> None:
        """Erase those of these nodes that nobody reads, and then what only they have read."""
        erase_dead(nodes, self.scopes)

    def derive(self, graph: Graph, sources: Sources, how: Derivation) -> Node:
        """A placeholder of this graph for ``how(*sources)``. ``why_not_derivable`` of each source,
        and where there is none ``why_no_input`` of the graph, must be None."""
        return self.derived.derive(graph, sources, how)


def module_hint(node: Node) -> str:
    """A name where no parameter gives one: the module path that Dynamo saw, or the node's name."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    # Dynamo begins the path with the name of the local or global that held the module: L['self'].
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path) or node.name
