"""Any other computation: a small graph of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node
from torch.nn import Module

from compile_ext.passes.readers import fill_value, is_empty, is_fill, op_name
from compile_ext.passes.values import storage, tensor


@dataclass(frozen=True)
class Program:
    """A small graph, its placeholders the sources in order; none for a constant of the model.

    Args:
        text: the whole computation; equal texts are equal programs.
        summary: the ops in order, for people.
        is_view: the result is a view of a source.
    """

    text: str
    summary: str = field(compare=False)
    is_view: bool = field(compare=False)
    graph: Graph = field(compare=False, repr=False)

    def __call__(self, *sources: Tensor) -> Tensor:
        # Interpreted: code would take 3 ms a program to generate, and runs when weights change.
        interpreter = Interpreter(Module(), graph=self.graph)
        result: Tensor = interpreter.run(*[x.detach() for x in sources])
        # No-ops at run time (a cast to the same dtype) hand their input on: a refresh writes here.
        if any(_same_storage(result, x) for x in sources):
            return result.clone()
        return result

    def __str__(self) -> str:
        return self.summary


def program_of(nodes: list[Node], sources: list[Node], result: Node) -> Program:
    """What ``nodes`` of a graph, in order, compute from ``sources``; ``result`` is one of them."""
    graph = Graph()
    copies = {x: graph.placeholder(f"source{i}") for i, x in enumerate(sources)}
    for node in nodes:
        copies[node] = _copy(node, graph, copies)
        copies[node].meta = {}  # fakes, which would keep the compilation's fake mode alive
    graph.output(copies[result])
    is_view = storage(result) in {storage(x) for x in sources}
    return _program(graph, is_view)


def _copy(node: Node, graph: Graph, copies: dict[Node, Node]) -> Node:
    """A node of the program. What it is allocated like (``x.new_ones(1)``) may be no source."""
    is_literal = node.target is torch.tensor
    if not is_literal and not is_fill(node) and not is_empty(node):
        return graph.node_copy(node, copies.__getitem__)
    like = tensor(node)
    assert like is not None
    form: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    if is_literal:  # the default dtype and device may be others by the time it is computed
        data = node.args[0] if node.args else node.kwargs["data"]
        return graph.call_function(torch.tensor, (data,), form)
    size = tuple(like.shape), tuple(like.stride())
    empty = graph.call_function(torch.empty_strided, size, form)
    value = fill_value(node)
    return empty if value is None else graph.call_method("fill_", (empty, value))


def _program(graph: Graph, is_view: bool) -> Program:
    names: dict[Node, str] = {}
    lines: list[str] = []
    ops: list[str] = []
    for node in graph.nodes:
        names[node] = node.name if node.op == "placeholder" else f"%{len(lines)}"
        if node.op not in ("placeholder", "output"):
            ops = (
                [*ops[:-1], f"full({node.args[1]})"]
                if _is_filling(node)
                else [*ops, op_name(node.target)]
            )
            lines.append(f"{_identity(node)}({_text((node.args, node.kwargs), names)})")
    lines.append(_text(graph.output_node().args, names))
    return Program("; ".join(lines), ", ".join(ops), is_view, graph)


def _is_filling(node: Node) -> bool:
    """The second half of what ``_copy`` makes of a fill."""
    return node.target == "fill_" and node.prev.target is torch.empty_strided


def _identity(node: Node) -> str:
    """A text that only this target has: the program keeps a function alive, and so its id."""
    return f"{node.op} {node.target if isinstance(node.target, str) else id(node.target)}"


def _text(value: Any, names: dict[Node, str]) -> str:
    """Numbers with their type: 1, 1.0, True and -0.0 are not the same argument."""
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_text(v, names)}' for k, v in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_text(v, names) for v in value)}]"
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), names)}"
    return repr(value)


def _same_storage(x: Tensor, y: Tensor) -> bool:
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)
