"""Expressions of casts, arithmetic and broadcasts, in their canonical form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from compile_ext.passes.expressions.expression import (
    Expr,
    InputNumber,
    Table,
    to_float32,
)
from compile_ext.passes.expressions.forms import FLOAT32, LOW, Value, is_one, named, widens
from compile_ext.passes.values import (
    dtype_name,
    is_static,
    same_size,
    value_in_this_call,
)

_INEXACT = object()


class Arithmetic:
    """Each method gives an expression of the table, or None where the bits may differ."""

    def __init__(self, table: Table) -> None:
        self.new = table

    def cast(self, x: Value, dtype: torch.dtype) -> Expr | None:
        if widens(x.dtype, dtype):
            return x.expr
        if x.expr is None or not (x.dtype.is_floating_point and dtype.is_floating_point):
            return None
        return self._rounded(x.expr, dtype)

    def _rounded(self, expr: Expr, dtype: torch.dtype) -> Expr:
        holds_it = expr.op in ("round", "leaf") and expr.args[1] == dtype_name(dtype)
        return expr if holds_it else self.new("round", expr, dtype_name(dtype))

    def broadcast(self, x: Value, shape: tuple[Any, ...]) -> Expr | None:
        """x at a larger shape: its rows repeated (which is not noted), or its elements."""
        own = (*([1] * (len(shape) - len(x.shape))), *x.shape)
        grown = [i for i, (a, b) in enumerate(zip(own, shape, strict=True)) if not same_size(a, b)]
        if not grown or x.expr is None:
            return x.expr
        kept = [i for i, size in enumerate(own) if not is_one(size)]
        if not all(is_one(own[i]) for i in grown):
            return None
        if kept and max(grown) < min(kept):
            return x.expr  # rows
        if (kept and max(kept) > min(grown)) or not all(is_static(shape[i]) for i in grown):
            return None
        return self.new("repeat", x.expr, math.prod(int(shape[i]) for i in grown))

    def binary(self, name: str, args: Sequence[Any], out: Value) -> Expr | None:
        first, second = (self._operand(x, out) for x in args)
        if first is None or second is None:
            return None
        both = isinstance(first, Expr) and isinstance(second, Expr)
        if name == "add" and both:
            return None  # the residual stream: what is before it belongs to other layers
        if name == "mul" and second == 1.0:
            return first  # type: ignore[no-any-return]  # torch spells 1 / x reciprocal(x) * 1
        if name == "div" and out.dtype == FLOAT32 and _is_sum_of(first, second):
            return self.new("mean", *first.args)  # what mean is on the CPU, bit for bit
        if both and out.dtype in LOW.values():
            # bfloat16 arithmetic computes in float32 and rounds once.
            return self._rounded(self.new(name, first, second), out.dtype)
        return self.new(named(name, out.dtype), first, second)

    def _operand(self, x: Any, out: Value) -> Any:
        """An expression broadcast to the result's shape, or a number."""
        if not isinstance(x, Value):
            return _number(x, to_float32 if out.dtype == FLOAT32 else float)
        if not widens(x.dtype, out.dtype):
            return None  # a 0-dim tensor, whose dtype does not take part in the promotion
        if x.expr is not None and x.expr.op == "fill":
            return x.expr.args[0] if out.dtype == FLOAT32 else None
        return self.broadcast(x, out.shape)

    def unary(self, name: str, x: Value, dtype: torch.dtype) -> Expr | None:
        if x.expr is None or x.dtype != dtype or not dtype.is_floating_point:
            return None
        # An absolute value is exact: it has no dtype of its own.
        return self.new(name if name == "abs" else named(name, dtype), x.expr)

    def clamp(self, x: Value, low: Any, high: Any, dtype: torch.dtype) -> Expr | None:
        expr = x.expr
        bounds = [_bound(b, dtype) for b in (low, high)]
        if expr is None or x.dtype != dtype or any(b is _INEXACT for b in bounds):
            return None
        if expr.op == "clamp":  # one after the other, in any order
            inner = expr.args[1:]
            merged = [i if b is None else b for b, i in zip(bounds, inner, strict=True)]
            is_split = all(b is None or i is None for b, i in zip(bounds, inner, strict=True))
            if is_split and all(isinstance(b, float) for b in merged) and merged[0] <= merged[1]:
                return self.new("clamp", expr.args[0], *merged)
        return self.new("clamp", expr, *bounds)


def _is_sum_of(x: Any, n: Any) -> bool:
    return isinstance(x, Expr) and x.op == "sum" and bool(x.args[1] == n)


def _number(x: Any, change: Callable[[float], Any]) -> Any:
    """A number as an operation takes it; None for what is none."""
    if isinstance(x, torch.SymFloat):
        value = change(value_in_this_call(x))
        return value if value is _INEXACT else InputNumber(str(x), value, partial(float, x))
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return None
    return change(x)


def _bound(value: Any, dtype: torch.dtype) -> Any:
    """A bound as clamp sees it, where its dtype does not change it."""

    def change(x: float) -> Any:
        if dtype == FLOAT32:
            return to_float32(x)
        return float(x) if torch.tensor(float(x), dtype=dtype).item() == x else _INEXACT

    found = None if value is None else _number(value, change)
    return _INEXACT if found is None and value is not None else found
