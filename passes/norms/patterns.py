"""The norms that are known: the reference of the op, traced like the graph.

A new formula is a function here and a spelling in the test; another spelling of a known formula
needs nothing. What decides whether two formulas are one is ``expressions/``: the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from compile_ext.ops.rms_norm import rms_norm_ref
from compile_ext.passes.expressions.expression import (
    Expr,
    InputNumber,
    Match,
    Table,
    difference,
    shortest,
    to_float32,
)
from compile_ext.passes.expressions.forms import LOW
from compile_ext.passes.expressions.trace import expressions_of

# Sizes and numbers that no other place of a pattern has: these stand for any.
_M, _K, _EPS = 7, 1009, to_float32(0.123456789)
_NUMBERS = {_K: "k", _EPS: "eps"}


@dataclass(frozen=True)
class Norm:
    """What an RMSNorm gives, ``y`` in ``dtype``, and reads: ``inputs`` (``x`` and, where it has
    one, ``weight``) and eps; ``numbers``: those of it that are inputs of the graph."""

    y: Expr
    dtype: torch.dtype
    inputs: Mapping[str, Expr]
    eps: float
    round_before_weight: bool
    k: int
    numbers: Sequence[InputNumber] = ()


def read_norm(y: Expr) -> Norm | str:
    """The RMSNorm that gives y, or how it differs from one."""
    dtype = norm_dtype(y)
    matches = [(Match(dict(_NUMBERS)), *pattern) for pattern in _patterns(dtype)]
    for match, pattern, variables, before in matches:
        if match.fits(pattern, y):
            inputs = {name: match.found[x] for name, x in variables.items()}
            if _is_centred(inputs["x"]):
                return "the mean is subtracted before it"
            eps, k = shortest(match.numbers["eps"]), int(match.numbers["k"])
            return Norm(y, dtype, inputs, eps, before, k, match.inputs)
    return difference((m for m, *_ in matches), "an RMSNorm")


def norm_dtype(y: Expr) -> torch.dtype:
    """The dtype that an expression was rounded to at last."""
    return LOW.get(str(y.args[-1]), torch.float32) if y.op == "round" else torch.float32


@lru_cache
def _patterns(dtype: torch.dtype) -> tuple[tuple[Expr, dict[str, Expr], bool], ...]:
    """Each with its variables, and ``round_before_weight``."""
    patterns: list[tuple[Expr, dict[str, Expr], bool]] = []
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
        patterns.append((y, {name: table("var", name) for name in inputs}, before))
    return tuple(patterns)


def _is_centred(x: Expr) -> bool:
    """Whether what an RMSNorm reads is a tensor less its mean: a LayerNorm."""
    return x.op.split(".")[0] == "sub" and any(p.op == "mean" for p in x.inside())
