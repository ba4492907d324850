"""Print a graph so that the text is the same on every torch version: for golden tests and for the
log.

Nodes are numbered, symbols renamed in order of appearance, ops named by schema, unused placeholders
left out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from compile_ext.passes.readers import op_name
from compile_ext.passes.scopes import body_modules
from compile_ext.passes.values import DERIVED, dtype_name, fake


def print_graph(module: GraphModule) -> str:
    """The graph as text, the bodies of higher-order ops indented below the line that first names
    them.
    """
    return "\n".join(_lines(module, {}, ""))


def _lines(module: GraphModule, symbols: dict[str, str], indent: str) -> list[str]:
    names: dict[Node, str] = {}
    bodies = dict(body_modules(module))
    lines: list[str] = []

    def name_of(x: Any) -> str:
        if isinstance(x, Node):
            return names.get(x, "?")
        if isinstance(x, (tuple, list)):
            return "[" + ", ".join(map(name_of, x)) + "]"
        return str(x).removeprefix("torch.")

    arguments = values = 0
    for node in module.graph.nodes:
        if node.op == "output":
            lines.append(f"{indent}return {name_of(node.args[0])}")
            continue
        if node.op == "placeholder":
            names[node] = f"arg{arguments}"
            arguments += 1
            if node.users and isinstance(fake(node), Tensor):
                kind = node.meta.get(DERIVED, "")
                lines.append(f"{indent}{names[node]}{_type(node, symbols)}{kind and f' = {kind}'}")
            continue
        names[node] = f"%{values}"
        values += 1
        if node in bodies:
            lines.append(f"{indent}{names[node]} = body:")
            lines += _lines(bodies[node], symbols, indent + "    ")
            continue
        args = [name_of(x) for x in node.args]
        args += [f"{k}={name_of(v)}" for k, v in sorted(node.kwargs.items())]
        op = f".{node.target}" if node.op == "call_method" else op_name(node.target)
        lines.append(f"{indent}{names[node]}{_type(node, symbols)} = {op}({', '.join(args)})")
    return lines


def _type(node: Node, symbols: dict[str, str]) -> str:
    value = fake(node)
    if not isinstance(value, Tensor):
        return ""
    dims = [
        str(d) if type(d) is int else symbols.setdefault(str(d), f"s{len(symbols)}")
        for d in value.shape
    ]
    return f": {dtype_name(value)}[{', '.join(dims)}]"
