"""A call of an op in a compiled graph, described so that it can be made again with other tensors of
the same form, for any M that it can have: what a warmup compiles for.

A size that depends on M is an expression in the letter ``M``: ``"M"``, ``"4*((M + 3)//4)"``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

Size = int | str  # a number, or an expression in M


class NotReachable(ValueError):
    """A size has no whole, non-negative value at this M: the call cannot have it."""


@dataclass(frozen=True)
class TensorForm:
    """What is known of a tensor without its data.

    Args:
        dtype: without the prefix ``torch.``.
        shape, strides, offset: in elements. An offset other than 0 is that of a view.
    """

    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size = 0

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same for every M."""
        return all(isinstance(x, int) for x in (*self.shape, *self.strides, self.offset))

    def make(self, m: int, device: torch.device | str) -> Tensor:
        """Zeros of this form where M is ``m``: of integers, which may be used as indices, as of
        floats."""
        shape, strides = ([value_of(x, m) for x in xs] for xs in (self.shape, self.strides))
        offset = value_of(self.offset, m)
        if device == "meta" and not offset:  # 3 times as fast, and asked thousands of times
            return torch.empty_strided(shape, strides, dtype=_dtype(self.dtype), device=device)
        span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        last = span if all(shape) else -1
        base = torch.zeros(offset + last + 1, dtype=_dtype(self.dtype), device=device)
        return base.as_strided(shape, strides, offset)


@dataclass(frozen=True)
class SizeValue:
    """An argument of type SymInt that depends on M."""

    size: str


# None, a number, a text and a torch.dtype stand for themselves; a list is a tuple here.
Value = Any


@dataclass(frozen=True)
class CallSite:
    """One form of call.

    Args:
        op: ``namespace::name.overload``.
        m: smallest and largest number of tokens; None for no upper bound.
        arguments: each argument of the schema and its value: a :class:`TensorForm`, a
            :class:`SizeValue`, None, a number, a text, a ``torch.dtype``, or a tuple of these.
        n, k: output and input features of a GEMM; None for another op.
    """

    op: str
    m: tuple[int, int | None]
    arguments: tuple[tuple[str, Value], ...]
    n: int | None = None
    k: int | None = None

    @property
    def overload(self) -> OpOverload:
        """Raises AttributeError where nobody has registered the op in this process."""
        return find_overload(self.op)

    def argument(self, name: str) -> Value:
        return dict(self.arguments)[name]

    def make(
        self, m: int, device: torch.device | str, fixed: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        """The arguments by name of a call where M is ``m``, tensors full of zeros.

        Args:
            fixed: tensors to take for arguments, from ``fixed()``.

        Raises:
            NotReachable: the call cannot have this M.
        """
        known = fixed or {}
        return {
            name: known[name] if name in known else _make(value, m, device)
            for name, value in self.arguments
        }

    def fixed(self, device: torch.device | str) -> dict[str, Tensor]:
        """The tensors that do not depend on M, the weights among them."""
        return {
            name: value.make(0, device)
            for name, value in self.arguments
            if isinstance(value, TensorForm) and value.is_fixed
        }


@dataclass(frozen=True)
class Call:
    """A site at one M, by one of its op's kernels (None: by the one that the op chooses)."""

    site: CallSite
    m: int
    kernel: str | None = None


def run_calls(calls: Iterable[Call], device: torch.device | str) -> None:
    """Make the calls on tensors full of zeros; weights of one site are made once."""
    for site, group in itertools.groupby(calls, lambda call: call.site):
        fixed = site.fixed(device)
        for call in group:
            arguments = {**site.make(call.m, device, fixed)}
            if call.kernel is not None:
                arguments["pinned"] = call.kernel
            site.overload(**arguments)


def find_overload(name: str) -> OpOverload:
    """``namespace::name.overload``. Raises AttributeError where there is none."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found: OpOverload = getattr(
        getattr(getattr(torch.ops, namespace), packet), overload or "default"
    )
    return found


def _make(value: Value, m: int, device: torch.device | str) -> Any:
    if isinstance(value, TensorForm):
        return value.make(m, device)
    if isinstance(value, SizeValue):
        return value_of(value.size, m)
    if isinstance(value, tuple):
        return [_make(x, m, device) for x in value]
    return value


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return found


def value_of(size: Size, m: int) -> int:
    """The value of a size where M is ``m``.

    Raises:
        NotReachable: it is no whole number from 0.
        ValueError: it is no expression of sums, products, ``//``, ``%``, ``Max``, ``Min``,
            numbers and M.
    """
    if isinstance(size, int):
        return size
    found = compiled(size)(m)
    if int(found) != found or found < 0:
        raise NotReachable(f"{size} is {found} where M is {m}")
    return int(found)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
}


@functools.lru_cache(maxsize=4096)
def compiled(size: str) -> Callable[[int], Any]:
    """``M -> value`` of an expression, which is data: nothing in it is run.

    Raises:
        ValueError: it is none.
    """
    import ast

    def build(node: ast.AST) -> Callable[[int], Any]:
        match node:
            case ast.Expression(body=body):
                return build(body)
            case ast.Constant(value=int() as number) if type(number) is int:
                return lambda m: number
            case ast.Name(id="M"):
                return lambda m: m
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = build(operand)
                return lambda m: -inner(m)
            case ast.BinOp(left=left, op=op, right=right) if type(op).__name__ in _OPERATORS:
                apply, x, y = _OPERATORS[type(op).__name__], build(left), build(right)
                return lambda m: apply(x(m), y(m))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                function, parts = _FUNCTIONS[name], [build(x) for x in args]
                return lambda m: function(*(x(m) for x in parts))
            case _:
                raise ValueError(f"{size!r} is no expression in M")

    try:
        tree = ast.parse(size, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{size!r} is no expression in M") from error
    function = build(tree)

    def checked(m: int) -> Any:
        try:
            return function(m)
        except (ZeroDivisionError, OverflowError, TypeError) as error:
            raise NotReachable(f"{size} has no value where M is {m}") from error

    return checked
