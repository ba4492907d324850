"""What an ATen op makes of the expressions of its arguments: one rule for each op that norms and
quantizations are made of. None for anything else, and where the bits may differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_ext.ops import column_major
from compile_ext.passes.expressions.arithmetic import Arithmetic
from compile_ext.passes.expressions.expression import Expr, to_float32
from compile_ext.passes.expressions.forms import FLOAT32, LOW, Value, is_one, named, widens
from compile_ext.passes.values import is_static, same_size

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """A call of an ATen op: tensors among its arguments are Values; ``out``: its first result."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Value


Rule = Callable[[Arithmetic, Call], Expr | None]


def apply_rule(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Value, make: Arithmetic
) -> Expr | None:
    """The expression of an op's first result."""
    read = args[1:] if op is aten.copy_.default else args  # what it held before does not matter
    rule = _RULES.get(op)
    if rule is None or any(isinstance(x, Value) and x.expr is None for x in read):
        return None
    return rule(make, Call(args, kwargs, out))


# ---- form ----------------------------------------------------------------------------------------


def _same(make: Arithmetic, call: Call) -> Expr | None:
    x: Value = call.args[0]
    return x.expr if call.out.dtype == x.dtype else None


def _expand(make: Arithmetic, call: Call) -> Expr | None:
    return make.broadcast(call.args[0], call.out.shape)


def _slice(make: Arithmetic, call: Call) -> Expr | None:
    """All of it: ``x[:, index]`` begins with that."""
    x: Value = call.args[0]
    return x.expr if all(map(same_size, x.shape, call.out.shape)) else None


def _cast(make: Arithmetic, call: Call) -> Expr | None:
    return make.cast(call.args[0], call.out.dtype)


def _copy(make: Arithmetic, call: Call) -> Expr | None:
    """``out.copy_(source)``, of the same shape."""
    source, shape = call.args[1], call.out.shape
    same = len(source.shape) == len(shape) and all(map(same_size, source.shape, shape))
    return make.cast(source, call.out.dtype) if same else None


def _fill(make: Arithmetic, call: Call) -> Expr | None:
    value = next((x for x in reversed(call.args) if isinstance(x, (int, float))), None)
    if call.out.dtype != FLOAT32 or value is None:
        return None
    return make.new("fill", to_float32(value))


def _pad(make: Arithmetic, call: Call) -> Expr | None:
    """Of the last dimension."""
    x, pads, value = call.args[0], call.args[1], (*call.args[2:], 0.0)[0]
    if any(pads[2:]) or not is_static(x.shape[-1]):
        return None
    return make.new("pad", x.expr, int(x.shape[-1]), *pads[:2], float(value))


def _arange(make: Arithmetic, call: Call) -> Expr | None:
    is_plain = len(call.args) == 1 and type(call.args[0]) is int and call.out.dtype == torch.int64
    return make.new("arange", call.args[0]) if is_plain else None


def _floor_divide(make: Arithmetic, call: Call) -> Expr | None:
    x, by = call.args
    is_plain = call.out.dtype == torch.int64 and type(by) is int
    return make.new("floor_divide", x.expr, by) if is_plain else None


def _index(make: Arithmetic, call: Call) -> Expr | None:
    """``x[..., index]`` with a 1-D index."""
    x, indices = call.args
    last = indices[-1]
    if len(indices) != len(x.shape) or any(i is not None for i in indices[:-1]):
        return None
    if last is None or last.expr is None or len(last.shape) != 1 or not is_static(x.shape[-1]):
        return None
    return make.new("index", x.expr, int(x.shape[-1]), last.expr)


# ---- arithmetic ----------------------------------------------------------------------------------


def _binary(name: str) -> Rule:
    def rule(make: Arithmetic, call: Call) -> Expr | None:
        if len(call.args) != 2 or call.kwargs:  # alpha, rounding_mode
            return None
        return make.binary(name, call.args, call.out)

    return rule


def _unary(name: str) -> Rule:
    return lambda make, call: make.unary(name, call.args[0], call.out.dtype)


def _power(make: Arithmetic, call: Call) -> Expr | None:
    x, exponent = call.args
    if x.dtype != FLOAT32 or call.out.dtype != FLOAT32:
        return None
    if exponent == 2:  # ATen's own kernels have these as special cases
        return make.new("mul", x.expr, x.expr)
    name = {-0.5: "rsqrt", 0.5: "sqrt", -1: "reciprocal"}.get(exponent)
    return None if name is None else make.unary(name, x, FLOAT32)


def _clamp(make: Arithmetic, call: Call) -> Expr | None:
    given = (*call.args[1:], None, None)
    low, high = call.kwargs.get("min", given[0]), call.kwargs.get("max", given[1])
    return make.clamp(call.args[0], low, high, call.out.dtype)


def _clamp_min(make: Arithmetic, call: Call) -> Expr | None:
    return make.clamp(call.args[0], call.args[1], None, call.out.dtype)


def _clamp_max(make: Arithmetic, call: Call) -> Expr | None:
    return make.clamp(call.args[0], None, call.args[1], call.out.dtype)


def _limit(is_low: bool) -> Rule:
    def rule(make: Arithmetic, call: Call) -> Expr | None:
        """``maximum(x, number)``, as a tensor."""
        fills = [x for x in call.args if x.expr.op == "fill"]
        others = [x for x in call.args if x.expr.op != "fill"]
        if len(fills) != 1 or not all(map(same_size, others[0].shape, call.out.shape)):
            return None
        number = fills[0].expr.args[0]
        low, high = (number, None) if is_low else (None, number)
        return make.clamp(others[0], low, high, call.out.dtype)

    return rule


# ---- reductions ----------------------------------------------------------------------------------


def _reduction(name: str) -> Rule:
    def rule(make: Arithmetic, call: Call) -> Expr | None:
        x, dtype = call.args[0], call.out.dtype
        n = _run_length(x.shape, (*call.args[1:], ())[0])
        if n is None or not widens(x.dtype, dtype):
            return None
        return make.new(name if name == "amax" else named(name, dtype), x.expr, n)

    return rule


def _run_length(shape: tuple[Any, ...], dims: Any) -> int | None:
    """How many elements in a row a reduction over these dimensions takes; None where they do not
    lie in a row."""
    rank = len(shape)
    given = [dims] if isinstance(dims, int) else dims or range(rank)
    reduced = {d % rank for d in given} if rank else set()
    wide = [i for i, size in enumerate(shape) if not is_one(size)]
    kept = [i for i in wide if i not in reduced]
    inner = [i for i in wide if i in reduced]
    if not all(is_static(shape[i]) for i in inner) or (kept and inner and max(kept) > min(inner)):
        return None
    return math.prod(int(shape[i]) for i in inner)


def last_size(x: Value, dim: int) -> int | None:
    """The size of the last dimension, if that is the one, and a number."""
    rank = len(x.shape)
    is_last = rank > 0 and dim % rank == rank - 1 and is_static(x.shape[-1])
    return int(x.shape[-1]) if is_last else None


def in_float32(make: Arithmetic, expr: Expr, out: Value) -> Expr | None:
    """ATen computes such a function of 16 bits in float32, and rounds once."""
    if out.dtype not in (FLOAT32, *LOW.values()):
        return None
    return make.cast(Value(expr, out.shape, FLOAT32), out.dtype)


def _softmax(make: Arithmetic, call: Call) -> Expr | None:
    x, dim = call.args[:2]
    n = last_size(x, dim)
    return None if n is None else in_float32(make, make.new("softmax", x.expr, n), call.out)


def _weighted_sum(make: Arithmetic, call: Call) -> Expr | None:
    """``[m, 1, l] @ [m, l, k]``: for each m the rows of the second, weighted."""
    weights, rows = call.args
    is_row = is_one(weights.shape[1]) and call.out.dtype == FLOAT32
    length, k = rows.shape[1:]
    if not is_row or not is_static(length) or not is_static(k):
        return None
    return make.new("weighted_sum", weights.expr, rows.expr, int(length), int(k))


_NO_CHANGE = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default,
    aten.alias.default, aten.detach.default,
)  # fmt: skip
_RULES: dict[Any, Rule] = {
    **dict.fromkeys((*_NO_CHANGE, column_major.OP), _same),
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: _cast,
    aten.copy_.default: _copy,
    aten.full.default: _fill,
    aten.full_like.default: _fill,
    aten.new_full.default: _fill,
    aten.scalar_tensor.default: _fill,
    aten.constant_pad_nd.default: _pad,
    aten.arange.default: _arange,
    aten.floor_divide.default: _floor_divide,
    aten.index.Tensor: _index,
    **{
        getattr(getattr(aten, f"{name}{inplace}"), kind): _binary(name)
        for name in ("add", "sub", "mul", "div")
        for inplace in ("", "_")
        for kind in ("Tensor", "Scalar")
    },
    **{
        getattr(aten, f"{name}{inplace}").default: _unary(name)
        for name in ("abs", "rsqrt", "sqrt", "reciprocal")
        for inplace in ("", "_")
    },
    aten.pow.Tensor_Scalar: _power,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp_min,
    aten.clamp_max.default: _clamp_max,
    aten.maximum.default: _limit(is_low=True),
    aten.minimum.default: _limit(is_low=False),
    aten.mean.dim: _reduction("mean"),
    aten.sum.dim_IntList: _reduction("sum"),
    aten.amax.default: _reduction("amax"),
    aten.max.dim: _reduction("amax"),
    aten._softmax.default: _softmax,
    aten.bmm.default: _weighted_sum,
}
