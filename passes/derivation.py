"""Derivations: pure functions of parameters whose result is a derived constant.

Every kind is a hashable callable that takes the sources in order, and equal derivations of the same
parameters share one constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from compile_ext.passes.readers import op_name, read_pad
from compile_ext.passes.values import storage


@dataclass(frozen=True)
class Padding:
    """``F.pad(x, pad, value=value)`` of one parameter.

    Args:
        pad: widths in elements as F.pad takes them, last dimension first.
        value: what the new elements hold.
        keep_order: the result has x's memory order (a column-major weight stays column-major);
            without, the strides are those that F.pad gives.
    """

    pad: tuple[int, ...]
    value: float = field(compare=False)
    keep_order: bool = False
    exact_value: str = field(init=False, repr=False)  # 0.0 and -0.0 are equal, nan and nan are not

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact_value", repr(float(self.value)))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.detach()
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        if not self.keep_order or order == list(range(x.dim())):
            return F.pad(x, self.pad, value=self.value)
        by_dim = self.widths(x.dim())
        permuted = [w for d in reversed(order) for w in by_dim[d]]
        padded = F.pad(x.permute(order), permuted, value=self.value)
        return padded.permute([order.index(d) for d in range(x.dim())])

    def widths(self, rank: int) -> list[tuple[int, int]]:
        """New elements before and behind, for each dimension."""
        last_first = [*zip(self.pad[::2], self.pad[1::2], strict=True)]
        return [*[(0, 0)] * (rank - len(last_first)), *reversed(last_first)]

    def keeps_as_prefix(self, x: Tensor) -> bool:
        """Whether x is the first part, in memory, of the result: x can live there."""
        if x.dim() == 0 or not x.is_contiguous():
            return False
        rows, *rest = self.widths(x.dim())
        return rows[0] == 0 and rows[1] > 0 and not any(map(any, rest))

    def __str__(self) -> str:
        return f"pad({list(self.pad)}, {self.value:g})"


@dataclass(frozen=True)
class Restride:
    """x where it lies as a kernel wants it, else a copy in the same memory order that does.

    The memory between the rows of a copy is zero, behind the last row as well: a kernel may read
    whole rows.

    Args:
        stride: strides other than 1 are multiples of this, in elements.
        address: so is the address, in bytes. At most 64, which every allocation has.
    """

    stride: int
    address: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        x, strides = x.detach(), self._strides(x)
        # A fake has no address; the graph is compiled for the strides alone.
        fits = strides == x.stride() and not isinstance(x, FakeTensor)
        if fits and x.data_ptr() % self.address == 0:
            return x
        size = max((n * s for n, s in zip(x.shape, strides, strict=True)), default=1)
        memory = torch.zeros(size, dtype=x.dtype, device=x.device)
        return memory.as_strided(x.shape, strides).copy_(x)

    def fits_strides(self, x: Tensor) -> bool:
        sizes = zip(x.stride(), x.shape, strict=True)
        return all(step == 1 or step % self.stride == 0 for step, n in sizes if n > 1)

    def _strides(self, x: Tensor) -> tuple[int, ...]:
        expanded = 0 in x.stride()  # which says nothing of the order
        if self.fits_strides(x) and not expanded:
            return x.stride()
        strides, step = [0] * x.dim(), 1
        for d in sorted(range(x.dim()), key=lambda d: (0 if expanded else x.stride(d), -d)):
            strides[d] = step
            step = -(-step * x.shape[d] // self.stride) * self.stride
        return tuple(strides)

    def __str__(self) -> str:
        what = [f"strides % {self.stride}"] * (self.stride > 1)
        what += [f"address % {self.address}"] * (self.address > 1)
        return f"fit({', '.join(what)})"


@dataclass(frozen=True)
class Program:
    """Any other computation on parameters: a small graph, its placeholders the sources in order.

    Args:
        text: the whole computation; equal texts are equal programs.
        summary: the ops in order, for people.
        is_view: the result is a view of a source.
    """

    text: str
    summary: str = field(compare=False)
    is_view: bool = field(compare=False)
    module: GraphModule = field(compare=False, repr=False)

    def __call__(self, *sources: Tensor) -> Tensor:
        result: Tensor = self.module(*[x.detach() for x in sources])
        # No-ops at run time (a cast to the same dtype) hand their input on: a refresh writes here.
        if any(_same_storage(result, x) for x in sources):
            return result.clone()
        return result

    def __str__(self) -> str:
        return self.summary


Step = Padding | Restride


@dataclass(frozen=True)
class Chain:
    """``steps`` in order, of what ``first`` gives: a computed weight, padded to its kernel's
    alignment."""

    first: Step | Program
    steps: tuple[Step, ...]

    def __call__(self, *sources: Tensor) -> Tensor:
        result: Tensor = self.first(*sources)
        for step in self.steps:
            result = step(result)
        return result

    def __str__(self) -> str:
        return " then ".join(map(str, (self.first, *self.steps)))


Derivation = Padding | Restride | Program | Chain


def derivation_of(nodes: list[Node], sources: list[Node], result: Node) -> Derivation:
    """What ``nodes`` of a graph, in order, compute from ``sources``; ``result`` is one of them."""
    call = read_pad(result) if nodes == [result] else None
    if call is not None and sources == [call.x]:
        return Padding(call.pad, call.value)
    graph = Graph()
    copies = {x: graph.placeholder(f"source{i}") for i, x in enumerate(sources)}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = {}  # fakes, which would keep the compilation's fake mode alive
    graph.output(copies[result])
    is_view = storage(result) in {storage(x) for x in sources}
    return _program(graph, is_view)


def after(first: Derivation, then: Step) -> Derivation:
    """``then`` of what ``first`` gives; two pads with one value are one pad."""
    if isinstance(first, Chain):
        both = _merged(first.steps[-1], then)
        steps = (*first.steps, then) if both is None else (*first.steps[:-1], both)
        return Chain(first.first, steps)
    merged = None if isinstance(first, Program) else _merged(first, then)
    return Chain(first, (then,)) if merged is None else merged


def _merged(first: Step, then: Step) -> Padding | None:
    if not isinstance(first, Padding) or not isinstance(then, Padding):
        return None
    if first.exact_value != then.exact_value or any(first.pad[::2]):
        return None
    rank = max(len(first.pad), len(then.pad))
    pads = [(*p.pad, *[0] * (rank - len(p.pad))) for p in (first, then)]
    return Padding(tuple(map(sum, zip(*pads, strict=True))), then.value, first.keep_order)


def _program(graph: Graph, is_view: bool) -> Program:
    names: dict[Node, str] = {}
    lines: list[str] = []
    ops: list[str] = []
    for node in graph.nodes:
        names[node] = node.name if node.op == "placeholder" else f"%{len(lines)}"
        if node.op not in ("placeholder", "output"):
            ops.append(op_name(node.target))
            lines.append(f"{_identity(node)}({_text((node.args, node.kwargs), names)})")
    lines.append(_text(graph.output_node().args, names))
    return Program("; ".join(lines), ", ".join(ops), is_view, GraphModule({}, graph))


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


def why_not(source: Any) -> str | None:
    """Why no constant may be derived from this tensor, or None."""
    if not isinstance(source, Tensor):
        return f"it is a {type(source).__name__}, not a tensor"
    if type(source) not in (Tensor, torch.nn.Parameter) and not isinstance(source, FakeTensor):
        return f"it is a tensor subclass ({type(source).__name__})"
    if source.layout != torch.strided:
        return f"its layout is {source.layout}"
    if source.is_inference():
        return "it is an inference tensor: without a version counter an update could not be seen"
    if source.numel() == 0:
        return "it has no elements"
    return None


def _same_storage(x: Tensor, y: Tensor) -> bool:
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)
