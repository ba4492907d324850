"""What the ATen ops that choose experts make of expressions, beside those of ``aten_rules.py``.

``topk(x, n, k)`` are the k largest of each run of n elements, ``top_ids(x, n, k)`` their places in
it; ``gather(x, n, ids)`` and ``scatter(x, n, ids, value)`` read and write places of such runs.
"""

from __future__ import annotations

from typing import Any

import torch

from compile_ext.passes.expressions.arithmetic import Arithmetic
from compile_ext.passes.expressions.aten_rules import (
    Call,
    Rule,
    apply_rule,
    in_float32,
    last_size,
)
from compile_ext.passes.expressions.expression import Expr, to_float32
from compile_ext.passes.expressions.forms import FLOAT32, Value

aten = torch.ops.aten


def apply_choice_rule(
    op: Any, args: Any, kwargs: dict[str, Any], out: Value, make: Arithmetic
) -> Expr | None:
    """The expression of an op's first result."""
    rule = _RULES.get(op)
    if rule is None or any(isinstance(x, Value) and x.expr is None for x in args):
        return apply_rule(op, args, kwargs, out, make)
    return rule(make, Call(args, kwargs, out))


def _sigmoid(make: Arithmetic, call: Call) -> Expr | None:
    return in_float32(make, make.new("sigmoid", call.args[0].expr), call.out)


def _topk(make: Arithmetic, call: Call) -> Expr | None:
    x, k = call.args[:2]
    dim = call.args[2] if len(call.args) > 2 else -1
    is_largest = len(call.args) < 4 or call.args[3]
    n = last_size(x, dim)
    return make.new("topk", x.expr, n, k) if n is not None and is_largest else None


def _gather(make: Arithmetic, call: Call) -> Expr | None:
    x, dim, index = call.args[:3]
    n = last_size(x, dim)
    return None if n is None else make.new("gather", x.expr, n, index.expr)


def _scatter(make: Arithmetic, call: Call) -> Expr | None:
    x, dim, index, value = call.args
    n = last_size(x, dim)
    number = _number(value)
    if n is None or number is None or call.kwargs:
        return None
    return make.new("scatter", x.expr, n, index.expr, number)


def _masked_fill(make: Arithmetic, call: Call) -> Expr | None:
    x, mask, value = call.args
    where, number = make.broadcast(mask, call.out.shape), _number(value)
    is_plain = call.out.dtype == FLOAT32 and len(x.shape) == len(call.out.shape)
    if where is None or number is None or not is_plain:
        return None
    return make.new("masked_fill", x.expr, where, number)


def _where(make: Arithmetic, call: Call) -> Expr | None:
    """Numbers where a mask is not set."""
    mask, x, other = call.args
    if not isinstance(x, Value):
        return None
    unset = Value(_inverted(make, mask.expr), mask.shape, mask.dtype)
    return _masked_fill(make, Call((x, unset, other), call.kwargs, call.out))


def _not(make: Arithmetic, call: Call) -> Expr | None:
    x: Value = call.args[0]
    assert x.expr is not None
    return _inverted(make, x.expr) if x.dtype == torch.bool else None


def _inverted(make: Arithmetic, expr: Expr) -> Expr:
    first: Expr | None = expr.args[0] if expr.op == "not" else None
    return first or make.new("not", expr)


def _is_zero(make: Arithmetic, call: Call) -> Expr | None:
    x, other = call.args
    return make.new("not", make.new("bool", x.expr)) if other == 0 else None


def _cast(make: Arithmetic, call: Call) -> Expr | None:
    """To a mask: what is not 0."""
    if call.out.dtype != torch.bool or call.args[0].dtype == torch.bool:
        return apply_rule(aten._to_copy.default, call.args, call.kwargs, call.out, make)
    return make.new("bool", call.args[0].expr)


def _add(make: Arithmetic, call: Call) -> Expr | None:
    """Two tensors: scores and their bias."""
    if len(call.args) != 2 or call.kwargs or not all(isinstance(x, Value) for x in call.args):
        return apply_rule(aten.add.Tensor, call.args, call.kwargs, call.out, make)
    first, second = (make.broadcast(x, call.out.shape) for x in call.args)
    if first is None or second is None or call.out.dtype != FLOAT32:
        return None
    return make.new("add", first, second)


def _zeros(make: Arithmetic, call: Call) -> Expr | None:
    return make.new("fill", 0.0)


def _number(value: Any) -> float | None:
    """A number, or a tensor of one."""
    if isinstance(value, Value):
        fill = value.expr
        return fill.args[0] if fill is not None and fill.op == "fill" else None
    return to_float32(value) if isinstance(value, (int, float)) else None


_RULES: dict[Any, Rule] = {
    aten.sigmoid.default: _sigmoid,
    aten.sigmoid_.default: _sigmoid,
    aten.topk.default: _topk,
    aten.gather.default: _gather,
    aten.scatter.value: _scatter,
    aten.scatter_.value: _scatter,
    aten.scatter.src: _scatter,
    aten.scatter_.src: _scatter,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill_.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.masked_fill_.Tensor: _masked_fill,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.bitwise_not.default: _not,
    aten.logical_not.default: _not,
    aten.eq.Scalar: _is_zero,
    aten._to_copy.default: _cast,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add,
    aten.zeros.default: _zeros,
    aten.zeros_like.default: _zeros,
    aten.new_zeros.default: _zeros,
}
