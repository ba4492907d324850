"""The norms and the quantizations that are known: plain functions, traced like the graph.

A new formula is a function here and a spelling in the test; another spelling of a known formula
needs nothing. What decides whether two formulas are one is ``expression.py``: the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from compile_ext.ops.quantize import BLOCK, FP8_MAX, quantize_fp8_groups
from compile_ext.ops.rms_norm import rms_norm_ref
from compile_ext.passes.norm_quantize.expression import (
    Expr,
    InputNumber,
    Match,
    Table,
    shortest,
    to_float32,
)
from compile_ext.passes.norm_quantize.trace import expressions_of

# Sizes and numbers that no other place of a pattern has: these stand for any.
_M, _K, _EPS = 7, 1009, to_float32(0.123456789)
_GROUPS = 2 * BLOCK
_NUMBERS = {_K: "k", _EPS: "eps"}


@dataclass(frozen=True)
class Norm:
    """What an RMSNorm reads: ``x``, the weight (None without one), eps; ``inputs``: the numbers of
    it that are inputs of the graph."""

    x: Expr
    weight: Expr | None
    eps: float
    round_before_weight: bool
    k: int
    inputs: Sequence[InputNumber] = ()


@dataclass(frozen=True)
class Quantization:
    """What 1x128 quantization reads, and its scale; ``inputs`` as in ``Norm``."""

    y: Expr
    scale: Expr
    inputs: Sequence[InputNumber] = ()


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
    return _difference(max((m for m, *_ in matches), key=_matched), "quantize_fp8_groups")


def read_norm(y: Expr, dtype: torch.dtype) -> Norm | str:
    """The RMSNorm that gives y in this dtype, or how it differs from one."""
    patterns = _norm_patterns(dtype)
    matches = [(Match(dict(_NUMBERS)), *pattern) for pattern in patterns]
    for match, pattern, x, weight, before in matches:
        if match.fits(pattern, y):
            found = None if weight is None else match.found[weight]
            eps, k = match.numbers["eps"], match.numbers["k"]
            return Norm(match.found[x], found, shortest(eps), before, int(k), match.inputs)
    return _difference(max((m for m, *_ in matches), key=_matched), "an RMSNorm")


@lru_cache(maxsize=64)
def _quantization_pattern(function: Quantize, k: int) -> tuple[Expr, Expr, Expr]:
    table = Table()
    q, scale = expressions_of(function, {"x": torch.empty(_M, k)}, table)
    return table("var", "x"), q, scale


@lru_cache
def _norm_patterns(
    dtype: torch.dtype,
) -> tuple[tuple[Expr, Expr, Expr | None, bool], ...]:
    patterns: list[tuple[Expr, Expr, Expr | None, bool]] = []
    for has_weight, before in ((True, False), (True, True), (False, False)):
        table = Table()
        inputs = {"x": torch.empty(_M, _K, dtype=dtype)}
        if has_weight:
            inputs["weight"] = torch.empty(_K)

        def norm(
            x: Tensor, weight: Tensor | None = None, before: bool = before
        ) -> tuple[Tensor, ...]:
            return (rms_norm_ref(x, weight, _EPS, before),)

        (y,) = expressions_of(norm, inputs, table)
        weight = table("var", "weight") if has_weight else None
        patterns.append((y, table("var", "x"), weight, before))
    return tuple(patterns)


def _matched(match: Match) -> tuple[int, bool]:
    return match.most


def _difference(match: Match, wanted: str) -> str:
    assert match.misfit is not None
    pattern, expr = match.misfit
    return f"it has {expr} where {wanted} has {pattern.text(match.variables)}"


def is_norm_and_quantization(q: Expr) -> bool:
    """Whether a float8 tensor is a candidate: scaled by the largest of some elements in a row, with
    a mean over more of them before it. (Over as many, Inductor fuses the two.)"""
    parts = list(q.inside())
    groups = {x.args[1] for x in parts if x.op == "amax"}
    means = {x.args[1] for x in parts if x.op.split(".")[0] in ("mean", "sum")}
    return any(g < n for g in groups for n in means)


def is_layer_norm(x: Expr) -> bool:
    """Whether what an RMSNorm reads is a tensor less its mean."""
    return x.op.split(".")[0] == "sub" and any(p.op == "mean" for p in x.inside())
