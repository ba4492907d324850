"""Every kind of derivation, and one behind another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from compile_ext.passes.derivation.padding import Padding
from compile_ext.passes.derivation.program import Program, program_of
from compile_ext.passes.derivation.restride import Restride
from compile_ext.passes.derivation.uninitialised import Uninitialised
from compile_ext.passes.readers import read_pad

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


Derivation = Padding | Restride | Program | Chain | Uninitialised


def derivation_of(nodes: list[Node], sources: list[Node], result: Node) -> Padding | Program:
    """What ``nodes`` of a graph, in order, compute from ``sources``; ``result`` is one of them."""
    call = read_pad(result) if nodes == [result] else None
    if call is not None and sources == [call.x]:
        return Padding(call.pad, call.value)
    return program_of(nodes, sources, result)


def after(first: Derivation, then: Step) -> Padding | Chain:
    """``then`` of what ``first`` gives; two pads with one value are one pad."""
    assert not isinstance(first, Uninitialised)
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
