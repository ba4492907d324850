"""The expressions of a graph's nodes, found backwards from where one is asked for."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from compile_ext.ops import column_major
from compile_ext.passes.effects import is_plain_write, written_arguments
from compile_ext.passes.expressions.arithmetic import Arithmetic
from compile_ext.passes.expressions.expression import Expr, Table
from compile_ext.passes.expressions.forms import Value, same_shape
from compile_ext.passes.expressions.trace import Trace, evaluate
from compile_ext.passes.expressions.traces import Traces
from compile_ext.passes.op_calls import overload
from compile_ext.passes.readers import is_empty
from compile_ext.passes.values import dtype_name, fake, tensor

_DEEPEST = 200  # nodes: further up is another layer, and Python's stack has an end


class NodeExpressions:
    """``of(node)``: its expression, whose leaves are the nodes that no rule knows, the sums of two
    tensors among them. One instance for one graph that does not change."""

    def __init__(self, scopes: Sequence[Any]) -> None:
        self._table = Table()
        self._make = Arithmetic(self._table)
        self._of: dict[Node, tuple[Expr, ...] | Expr] = {}
        self._nodes: dict[Expr, list[Node]] = {}
        self._traces = Traces(scopes)
        self._depth = 0

    def nodes(self, expr: Expr) -> list[Node]:
        """Those seen so far that hold it."""
        return self._nodes.get(expr, [])

    def of(self, node: Node) -> Expr:
        found = self._of.get(node)
        if found is None:
            self._depth += 1
            found = (self._read(node) if self._depth < _DEEPEST else None) or self._leaf(node)
            self._depth -= 1
            self._of[node] = found
            self._nodes.setdefault(found, []).append(node)
        assert isinstance(found, Expr)
        return found

    def is_leaf(self, node: Node) -> bool:
        expr = self.of(node)
        return expr.op == "leaf" and expr.args[0] is node

    def _leaf(self, node: Node, *inside: Expr) -> Expr:
        found = tensor(node)
        return self._table("leaf", node, "" if found is None else dtype_name(found), *inside)

    def _read(self, node: Node) -> Expr | None:
        if not node.op.startswith("call_"):
            return None
        if node.target is operator.getitem and isinstance(fake(node.args[0]), (tuple, list)):
            # x.max(dim)[0]: of an op with several results, the rules know the first.
            return self.of(node.args[0]) if node.args[1] == 0 else None  # type: ignore[arg-type]
        if is_empty(node):
            write = filled_by(node)
            return None if write is None else self._copied(write, node)
        if overload(node) is column_major.OP:
            return self.of(node.args[0])  # type: ignore[arg-type]
        if is_plain_write(node):
            buffer = node.args[0]
            is_fill = isinstance(buffer, Node) and is_empty(buffer) and filled_by(buffer) is node
            return self._copied(node, buffer) if is_fill else None
        return self._computed(node) if holds_tensors(node) else None

    def _copied(self, write: Node, buffer: Any) -> Expr | None:
        """What a buffer holds after ``buffer.copy_(source)``."""
        source, target = write.args[1], tensor(buffer)
        found = tensor(source)
        if target is None or found is None or not isinstance(source, Node):
            return None
        if not same_shape(found, target):
            return None
        value = Value(self.of(source), tuple(found.shape), found.dtype)
        return self._make.cast(value, target.dtype)

    def _computed(self, node: Node) -> Expr | None:
        trace = self._traces.of(node) if not written_arguments(node) else None
        if trace is None or not trace.is_clear or trace.result is None:
            return None
        inputs = [self.of(x) for x in node.all_input_nodes if tensor(x) is not None]
        found = evaluate(trace, inputs, self._make)[trace.result.at]
        if found is None and _is_pointwise(trace):
            # Nothing that a pattern could have; but what is nearly one shall be seen.
            return self._leaf(node, *inputs)
        return found


def _is_pointwise(trace: Trace) -> bool:
    """Not a sum: behind that begins another layer."""
    return all(torch.Tag.pointwise in op.tags and op not in _SUMS for op in trace.ops)


_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def holds_tensors(node: Node) -> bool:
    """A tensor, or several."""
    value = fake(node)
    return isinstance(value[0] if isinstance(value, (tuple, list)) and value else value, Tensor)


def filled_by(buffer: Node) -> Node | None:
    """The copy that fills an empty buffer, where nothing else writes it and nothing reads it
    before."""
    writes = [x for x in buffer.users if written_arguments(x)]
    if len(writes) != 1 or writes[0].op != "call_method" or writes[0].target != "copy_":
        return None
    write = writes[0]
    is_whole = len(write.args) == 2 and not write.kwargs and write.args[0] is buffer
    return write if is_whole and all(write < x or x is write for x in buffer.users) else None
