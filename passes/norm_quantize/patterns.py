"""The quantizations that are known, as ``norms/patterns.py`` has the norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from compile_ext.ops.quantize import BLOCK, FP8_MAX, quantize_fp8_groups
from compile_ext.passes.expressions.expression import Expr, InputNumber, Match, Table, difference
from compile_ext.passes.expressions.trace import expressions_of

_M = 7
_GROUPS = 2 * BLOCK


@dataclass(frozen=True)
class Quantization:
    """What 1x128 quantization reads, and its scale; ``numbers``: those of it that are inputs of the
    graph."""

    y: Expr
    scale: Expr
    numbers: Sequence[InputNumber] = ()


Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]


def _without_clamp(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers: x / scale is at most 448 * (1 + 2^-22), which rounds to 448 (e4m3 has no
    number between 448 and the 464 from where on conversions overflow)."""
    grouped = x.float().unflatten(1, (-1, BLOCK))
    scale = grouped.abs().amax(-1).clamp(min=1e-10) / FP8_MAX
    return (grouped / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1), scale


def read_quantization(q: Expr, k: int) -> Quantization | str:
    """What ``q [..., k]`` quantizes, or how it differs from ``quantize_fp8_groups``."""
    # Of whole groups the expression says nothing of k.
    functions: list[tuple[Quantize, int]] = [
        (quantize_fp8_groups, _GROUPS),
        (_without_clamp, _GROUPS),
    ]
    if k % BLOCK:
        functions.append((quantize_fp8_groups, k))
    matches = [(Match(), *_quantization_pattern(*function)) for function in functions]
    for match, y, pattern, scale in matches:
        if match.fits(pattern, q):
            return Quantization(match.found[y], match.found[scale], match.inputs)
    return difference((m for m, *_ in matches), "quantize_fp8_groups")


@lru_cache(maxsize=64)
def _quantization_pattern(function: Quantize, k: int) -> tuple[Expr, Expr, Expr]:
    table = Table()
    q, scale = expressions_of(function, {"x": torch.empty(_M, k)}, table)
    return table("var", "x"), q, scale


def is_norm_and_quantization(q: Expr) -> bool:
    """Whether a float8 tensor is a candidate: scaled by the largest of some elements in a row, with
    a mean over more of them before it. (Over as many, Inductor fuses the two.)"""
    parts = list(q.inside())
    groups = {x.args[1] for x in parts if x.op == "amax"}
    means = {x.args[1] for x in parts if x.op.split(".")[0] in ("mean", "sum")}
    return any(g < n for g in groups for n in means)
