"""Describe the call of an op that a node makes, with no data and for every M: what a warmup makes
again (``ops/call_site.py``).

A kernel sees M alone, not the batch and the sequence that make it up. So of the symbols that M is
a product of, all but the last are set to 1; tensors that share the leading dimensions of the
activation get one dimension of M rows for them, as a kernel's ``reshape(-1, k)`` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from compile_ext.ops.call_site import CallSite, Size, SizeValue, TensorForm, Value, compiled
from compile_ext.ops.contract import Gemm, m_of, m_of_gemm
from compile_ext.passes.op_calls import OpCall
from compile_ext.passes.values import bounds, dtype_name, fakes, is_static, value_in_this_call

# A kernel sees of an address only what it is a multiple of; allocations are of 64 bytes or more.
_ALIGNED = 64


class NotExpressible(Exception):
    """Why a call cannot be made again from a description."""


def call_site(call: OpCall) -> CallSite:
    """The call that a node makes.

    Raises:
        NotExpressible: the text is the reason.
    """
    arguments: dict[str, Any] = fakes(call.arguments)
    gemm = call.contract.gemm
    a = arguments[gemm.a] if gemm else next(_tensors(arguments.values()), None)
    m: Any = 1
    leading: Any = ()
    if isinstance(a, Tensor):
        m, leading = m_of_gemm(call.op, gemm, a) if gemm else m_of(a), a.shape[:-1]
    rows = leading if isinstance(a, Tensor) and _is_flat(gemm, a, arguments) else ()
    in_m = _solver(m, leading)
    n, k = _weight_sizes(gemm, arguments)
    low, high = bounds(m)
    return CallSite(
        op=f"{call.op._schema.name}.{call.op._overloadname}",
        m=(max(low, 1) if high != 0 else 0, high),  # a call of no tokens runs nothing
        arguments=tuple((name, _value(name, x, rows, in_m)) for name, x in arguments.items()),
        n=n,
        k=k,
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    return (x for x in values if isinstance(x, Tensor))


def _weight_sizes(gemm: Gemm | None, arguments: dict[str, Any]) -> tuple[int | None, int | None]:
    b = arguments[gemm.b] if gemm else None
    if gemm is None or not isinstance(b, Tensor) or b.dim() < 2:
        return None, None
    n, k = b.shape[-2:] if gemm.layout == "nt" else b.shape[-2:][::-1]
    return (int(n) if is_static(n) else None), (int(k) if is_static(k) else None)


def _is_flat(gemm: Gemm | None, a: Tensor, arguments: dict[str, Any]) -> bool:
    """Whether the leading dimensions of ``a`` are M together, and appear in the other tensors as
    their leading dimensions or not at all."""
    rows = [_expression(s) for s in a.shape[:-1]]
    if (gemm is not None and gemm.m_axis is not None) or len(rows) < 2:
        return False
    for x in _tensors(arguments.values()):
        sizes = [_expression(s) for s in x.shape]
        found = [i for i in range(len(sizes)) if sizes[i : i + len(rows)] == rows]
        if found not in ([], [0]) or (found == [0] and len(sizes) != len(rows) + 1):
            return False
    return True


def _expression(size: int | torch.SymInt) -> Any:
    if isinstance(size, torch.SymInt):
        return size.node.expr
    import sympy  # 0.2 s: not at import time

    return sympy.Integer(size)


InM = Callable[[Any], Size]


def _solver(m: int | torch.SymInt, leading: Iterable[int | torch.SymInt]) -> InM:
    """``size -> number or expression in M``, where M is ``m``, of an activation with these leading
    dimensions.

    A symbol is replaced by another one whose name is its value in M, in brackets: the text of the
    result is the expression wanted, and sympy needs no rules for the rounding of fractions.
    """
    import sympy

    whole = _expression(m)
    order = [s for x in leading for s in sorted(_expression(x).free_symbols, key=str)]
    symbols = [s for s in dict.fromkeys(order) if s in whole.free_symbols]
    letter = sympy.Symbol("M", integer=True, positive=True)
    values: dict[Any, Any] = {}
    for kept in reversed(symbols):  # the last that M is proportional to: the sequence
        ones = {s: sympy.Integer(1) for s in symbols if s is not kept}
        rest = whole.xreplace(ones)
        offset = rest.xreplace({kept: sympy.Integer(0)})
        factor = sympy.expand(rest - offset) / kept
        if offset.is_Integer and factor.is_Integer and factor > 0:
            values = {**ones, kept: _named(letter, int(factor), int(offset))}
            break

    def in_m(size: Any) -> Size:
        if isinstance(size, int):
            return size
        found = _expression(size) if isinstance(size, torch.SymInt) else size
        if symbols:
            found = found.subs(whole, letter).xreplace(values)
        if found.is_Integer:
            return int(found)
        text = str(found)
        # Dynamo's names for symbols are no part of a manifest.
        if found.free_symbols - {letter, *values.values()}:
            raise NotExpressible("a size of it does not follow from M alone")
        try:
            compiled(text)
        except ValueError as error:
            raise NotExpressible(f"a size of it is {text}, which is no sum or product") from error
        return text

    return in_m


def _named(letter: Any, factor: int, offset: int) -> Any:
    """What the symbol is where M is ``factor * symbol + offset``."""
    import sympy

    if (factor, offset) == (1, 0):
        return letter
    text = f"M - {offset}" if offset > 0 else f"M + {-offset}" if offset else "M"
    if factor != 1:
        text = f"({text})/{factor}" if offset else f"M/{factor}"
    return sympy.Symbol(f"({text})", integer=True, positive=True)


def _value(name: str, x: Any, rows: Any, in_m: InM) -> Value:
    """An argument as a CallSite holds it."""
    match x:
        case Tensor():
            return _form(name, x, [_expression(s) for s in rows], in_m)
        case list() | tuple():
            return tuple(_value(name, item, rows, in_m) for item in x)
        case torch.SymInt():
            size = in_m(x)
            return size if isinstance(size, int) else SizeValue(size)
        case torch.SymFloat():  # dynamic=True makes inputs of floats: no kernel is compiled for one
            return value_in_this_call(x)
        case float() if not math.isfinite(x):
            raise NotExpressible(f"{name} is {x}")
        case None | bool() | int() | float() | str() | torch.dtype():
            return x
        case _:
            raise NotExpressible(f"{name} is a {type(x).__name__}")


def _form(name: str, x: Tensor, rows: list[Any], in_m: InM) -> TensorForm:
    if x.layout != torch.strided:
        raise NotExpressible(f"{name} is {x.layout}")
    shape, strides = list(x.shape), list(x.stride())
    if rows and [_expression(s) for s in shape[: len(rows)]] == rows:
        shape, strides = _flat(*([_expression(s) for s in xs] for xs in (shape, strides)))
    offset = in_m(x.storage_offset())
    if isinstance(offset, int):
        offset %= max(1, _ALIGNED // x.element_size())
    return TensorForm(
        dtype_name(x),
        tuple(map(in_m, shape)),
        tuple(map(in_m, strides)),
        offset,
    )


def _flat(shape: list[Any], strides: list[Any]) -> tuple[list[Any], list[Any]]:
    """All leading dimensions as one: with one stride where they have one, else contiguous, as
    ``reshape`` copies them."""
    import sympy

    long = [(n, s) for n, s in zip(shape[:-1], strides[:-1], strict=True) if n != 1]
    together = all(sympy.expand(_whole(s - t * n)) == 0 for (_, s), (n, t) in pairwise(long))
    row = long[-1][1] if long else shape[-1]
    m = sympy.prod(shape[:-1])
    return [m, shape[-1]], ([row, strides[-1]] if together else [shape[-1], sympy.Integer(1)])


def _whole(stride: Any) -> Any:
    """``Max(1, s)``, as strides have it of a size that may be 0, is ``s``: of no elements, none
    matters."""
    return stride.replace(
        lambda x: type(x).__name__ == "Max" and len(x.args) == 2 and 1 in x.args,
        lambda x: next(y for y in x.args if y != 1),
    )
