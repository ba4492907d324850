"""What a pass gets beside the graph: the inputs, the report, and the ways to change a graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from compile_ext.passes import derivation
from compile_ext.passes.effects import leaving_storages, written_arguments, written_storages
from compile_ext.passes.readers import OpCall, is_droppable, op_name, weight_source
from compile_ext.passes.report import Decision, Entry, GraphReport
from compile_ext.passes.scopes import Scope, find_scopes
from compile_ext.passes.values import DERIVED, fake, fakes, storage

# Meta key of a node: why the passes must leave it alone (set before the first pass, see
# `regions.py`).
STAND_BACK = "compile_ext_stand_back"


@dataclass(frozen=True)
class DerivedInput:
    """An extra input of the rewritten graph: ``derivation`` of the root input ``source``."""

    source: int
    derivation: derivation.Derivation


@dataclass(eq=False)
class PassContext:
    """Shared by all passes of one compilation.

    Args:
        root: the copied graph module.
        inputs: its real inputs, parameters among them, in placeholder order.
        pass_name: the pass that runs; the pipeline sets it.
    """

    root: GraphModule
    inputs: Sequence[Any]
    report: GraphReport = field(default_factory=GraphReport)
    derived: list[DerivedInput] = field(default_factory=list)
    # For compile_ext.check: new node -> the node of the original graph that it stands for, and the
    # nodes that hold something else under their old name.
    replaced: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    pass_name: str = ""

    def __post_init__(self) -> None:
        self.scopes = find_scopes(self.root)
        self._scope_of: dict[Graph, Scope] = {s.graph: s for s in self.scopes}
        self._root_inputs = {n: i for i, n in enumerate(self.scopes[0].placeholders())}
        self._derived_nodes: dict[tuple[Node, derivation.Derivation], Node] = {}
        self._derived_from: dict[Node, Node] = {}
        self._derived_how: dict[Node, derivation.Derivation] = {}
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
        """The report's entry of a candidate; ``weight`` names it (default: the node's first
        parameter).
        """
        roots = self.root_inputs(weight) if weight is not None else ()
        if not roots:
            roots = next((r for a in node.all_input_nodes if (r := self._static_roots(a))), ())
        return self.report.entry(node, op_name(node.target), roots, module_hint(node))

    def _static_roots(self, node: Node) -> tuple[int, ...]:
        roots = self.root_inputs(node)
        return roots if roots and all(self._is_static(i) for i in roots) else ()

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
        source = self._derived_from.get(source, source)
        if source in self._root_inputs:
            return (self._root_inputs[source],)
        scope = self._scope_of.get(source.graph)
        if scope is None or source not in (placeholders := scope.placeholders()):
            return ()
        at = placeholders.index(source)
        found: list[int] = []
        for call in scope.calls:
            operands = call.operands()
            if operands is not None and at < len(operands):
                found += self.root_inputs(operands[at])
        return tuple(dict.fromkeys(found))

    def is_written(self, node: Node) -> bool:
        """Whether a node of this compilation writes the storage of ``node``, or of what it stands
        for.
        """
        if storage(node) in self._written:
            return True
        placeholders = self.scopes[0].placeholders()
        return any(storage(placeholders[i]) in self._written for i in self.root_inputs(node))

    def why_not_shared(self, node: Node) -> str | None:
        """Why a tensor that is made on each call may not become one that all calls share."""
        if storage(node) in self._written:
            return "the graph writes the result"
        return "the graph hands the result out" if storage(node) in self._leaving else None

    def why_not_derivable(self, node: Any) -> str | None:
        """Why no constant can be derived from this node, or None."""
        if not isinstance(node, Node) or node.op != "placeholder":
            return "it is computed in the graph, not a parameter or buffer"
        node = self._derived_from.get(node, node)
        if node not in self._root_inputs:
            return self._why_not_through_calls(node)
        index = self._root_inputs[node]
        if not self._is_static(index):
            return "it is an input of the call, not a parameter or buffer"
        if self.is_written(node):
            return "the graph writes it"
        return derivation.why_not(self.inputs[index])

    def _why_not_through_calls(self, node: Node) -> str | None:
        scope = self._scope_of[node.graph]
        at = scope.placeholders().index(node)
        for call in scope.calls:
            operands = call.operands()
            if operands is None:
                return f"it is inside {call.name}, which takes no further operand"
            if any(len(b.calls) > 1 for b in call.bodies) and len(call.bodies) > 1:
                return f"a body of {call.name} is shared with another call"
            if at >= len(operands):
                return f"{call.name} does not hand it in as an operand"
            reason = self.why_not_derivable(operands[at])
            if reason:
                return reason
        return None if scope.calls else "nothing calls its graph"

    def is_parameter(self, node: Node) -> bool:
        """Whether a node is a parameter or buffer itself, no view of it and nothing computed from
        it.
        """
        return node.op == "placeholder" and bool(self._static_roots(node))

    def _is_static(self, index: int) -> bool:
        meta = self.scopes[0].placeholders()[index].meta
        return bool((meta.get("tensor_dict") or {}).get("_dynamo_static_input_type"))

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
        graph = before.graph
        with graph.inserting_before(before):
            if isinstance(target, str):
                node = graph.call_method(target, args, kwargs)
            else:
                node = graph.call_function(target, args, kwargs)
        origin = (like or before).meta
        keep = ("nn_module_stack", "stack_trace", "source_fn_stack", STAND_BACK)
        node.meta.update({k: origin[k] for k in keep if k in origin})
        self._update_fake(node)
        return node

    def rewrite(self, call: OpCall, changes: dict[str, Any], op: OpOverload | None = None) -> None:
        """Give a call other arguments, or another op of the same schema; what only it has read
        goes.
        """
        before = call.node.all_input_nodes
        call.rewrite(changes, op)
        self._update_fake(call.node)
        for x in before:
            if is_droppable(x):
                self.drop(x)

    def _update_fake(self, node: Node) -> None:
        args, kwargs = fakes(node.args), fakes(node.kwargs)
        mode = self._fake_mode()
        quiet = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
        # Without the Python dispatcher, composite ops run in C++ and turn a symbolic M into a
        # number.
        with torch.no_grad(), enable_python_dispatcher(), mode, quiet:
            if node.op == "call_method":
                value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta["example_value"] = value

    def _fake_mode(self) -> Any:
        for scope in self.scopes:
            for node in scope.graph.nodes:
                value = fake(node)
                if isinstance(value, torch._subclasses.FakeTensor):
                    return value.fake_mode
        raise AssertionError("a candidate was found in a graph without tensors")

    def replace(self, old: Node, new: Node) -> None:
        """Put ``new`` in the place of ``old`` for all its readers, then drop ``old``."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.report.moved(old, new)
        self._note_origin(new, old)
        self.drop(old)

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

    def drop(self, node: Any) -> None:
        """Erase a node that nobody reads any more, and then what only it has read.

        Not ``eliminate_dead_code``: in a Dynamo graph that also removes ``x.add_(1)`` whose result
        nobody reads.
        """
        if (
            not isinstance(node, Node)
            or node.users
            or node.op in ("placeholder", "output", "get_attr")
        ):
            return
        if written_arguments(node):
            return
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for x in inputs:
            if is_droppable(x):
                self.drop(x)

    def derive(self, node: Node, how: derivation.Padding) -> Node:
        """A placeholder for ``how(node)``; ``why_not_derivable(node)`` must be None."""
        if node in self._derived_from:  # a constant of a constant hangs on the parameter as well
            return self._derive(
                self._derived_from[node], derivation.after(self._derived_how[node], how)
            )
        return self._derive(node, how)

    def _derive(self, node: Node, how: derivation.Derivation) -> Node:
        if (node, how) in self._derived_nodes:
            return self._derived_nodes[node, how]
        scope = self._scope_of[node.graph]
        meta = {
            "example_value": self._derived_fake(node, how),
            "tensor_dict": {"_dynamo_static_input_type": "unguarded"},
            DERIVED: str(how),
        }
        if scope is self.scopes[0]:
            # Loads all of Dynamo: not at import time.
            from torch._dynamo.source import EphemeralSource

            name = f"compile_ext_derived_{len(self.derived)}"
            new = scope.add_placeholder(name, meta)
            new._dynamo_source = EphemeralSource(name)
            self.derived.append(DerivedInput(self._root_inputs[node], how))
        else:
            new = self._derive_in_body(scope, node, how, meta)
        self._derived_nodes[node, how] = new
        self._derived_from[new], self._derived_how[new] = node, how
        return new

    def derived_fakes(self) -> list[Any]:
        """The fakes of the extra inputs, in the order of ``derived``."""
        placeholders = self.scopes[0].placeholders()
        return [fake(p) for p in placeholders[len(placeholders) - len(self.derived) :]]

    def _derived_fake(self, node: Node, how: derivation.Derivation) -> Tensor:
        mode = self._fake_mode()
        with torch.no_grad(), mode:
            result: Tensor = how(fake(node))
            return result

    def _derive_in_body(
        self, scope: Scope, node: Node, how: derivation.Derivation, meta: dict[str, Any]
    ) -> Node:
        at = scope.placeholders().index(node)
        for call in scope.calls:
            operands = call.operands()
            assert operands is not None  # why_not_derivable saw to it
            call.append(self._derive(operands[at], how))
        bodies = [scope, *(b for c in scope.calls for b in c.bodies if b is not scope)]
        name = f"compile_ext_derived_{len(scope.placeholders())}"
        for body in dict.fromkeys(bodies):
            source = body.placeholders()[at]
            new = body.add_placeholder(name, meta)
            # The other branches of a cond find it there: a second operand would be the same tensor.
            self._derived_nodes[source, how] = new
            self._derived_from[new], self._derived_how[new] = source, how
        return self._derived_nodes[node, how]


def module_hint(node: Node) -> str:
    """A name where no parameter gives one: the module path that Dynamo saw, or the node's name."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    # Dynamo begins the path with the name of the local or global that held the module: L['self'].
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path) or node.name
