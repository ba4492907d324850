"""Expressions: what a tensor holds, independent of how the graph spells and shapes it.

An expression stands for the elements of a tensor in logical (row-major) order, as numbers:

* a view, a copy and a reshape of e are e; so is a cast to a wider float, which changes no number;
* an operation in float32 has its plain name; one in bfloat16 is ``round(e, bfloat16)`` of it, or,
  where that would not give the same bits, its name says the dtype (``mul.bfloat16``);
* ``mean(e, n)`` reduces runs of n elements, ``repeat(e, n)`` repeats each element n times. An
  operand that is too short is repeated as a whole, as torch broadcasts a row.

Equal expressions over the same leaves hold equal bits in eager mode.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

COMMUTATIVE = ("add", "mul")


@dataclass(frozen=True)
class InputNumber:
    """A float that is an input of the graph (``dynamic=True`` makes inputs of a model's floats), at
    its value in this call. What relies on the value must guard on it."""

    symbol: str
    value: float
    guard: Callable[[], object] = field(compare=False)

    def __str__(self) -> str:
        return f"{shortest(self.value):g}"


@dataclass(frozen=True, eq=False)
class Expr:
    """``op(*args)``: arguments are expressions, numbers and names of dtypes. Made by a table, so
    that within one table equal expressions are the same object."""

    op: str
    args: tuple[Any, ...]
    number: int = 0  # in the order in which they were made

    def __str__(self) -> str:
        """One level of it."""
        return self.text({})

    def text(self, names: Mapping[float, str]) -> str:
        """One level of it, with names for numbers of a pattern."""
        if self.op in ("leaf", "var"):
            return str(self.args[0])
        return f"{self.op}({', '.join(_text(x, names) for x in self.args)})"

    def inside(self) -> Iterator[Expr]:
        """Itself and all that it is made of, each once."""
        seen: set[Expr] = set()
        todo = [self]
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                yield at
                todo += [x for x in at.args if isinstance(x, Expr)]


def _text(x: Any, names: Mapping[float, str]) -> str:
    if isinstance(x, Expr):
        return "..."
    if isinstance(x, float):
        return names.get(x) or f"{shortest(x):g}"
    return names.get(x) or str(x) if isinstance(x, int) else str(x)


def to_float32(value: float) -> float:
    """A number as a float32 kernel sees it."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def shortest(value: float) -> float:
    """The number with the fewest digits that is the same in float32: 1e-06, where F.rms_norm says
    9.999999974752427e-07."""
    texts = (f"{value:.{n}g}" for n in range(1, 17))
    return next((float(x) for x in texts if to_float32(float(x)) == to_float32(value)), value)


class Table:
    """Makes expressions, each once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Expr] = {}

    def __call__(self, op: str, *args: Any) -> Expr:
        if op in COMMUTATIVE:
            last = len(self._made)
            args = tuple(sorted(args, key=lambda x: x.number if isinstance(x, Expr) else last))
        # 2 == 2.0 == True: their types belong to the key.
        key = (op, *((type(x), x) for x in args))
        return self._made.setdefault(key, Expr(op, args, len(self._made)))


@dataclass
class Match:
    """A pattern laid over an expression. A pattern is an expression too; ``var`` stands for any
    expression, the keys of ``variables`` for any number.

    Args:
        variables: number in the pattern -> name of what it stands for.
        found: of each part of the pattern, the part of the expression.
        numbers: of each name, the number in the expression.
        inputs: the numbers, of those that were compared, that are inputs of the graph.
        misfit: after a failure, the parts that differ, the pattern's first, behind the ``most``
            parts that did match.
    """

    variables: dict[float, str] = field(default_factory=dict)
    found: dict[Expr, Expr] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    inputs: list[InputNumber] = field(default_factory=list)
    misfit: tuple[Expr, Expr] | None = None
    most: tuple[int, bool] = (-1, False)

    def fits(self, pattern: Expr, expr: Expr) -> bool:
        if pattern in self.found:
            return self.found[pattern] is expr or self._miss(pattern, expr)
        if pattern.op == "var":
            self.found[pattern] = expr
            return True
        if pattern.op != expr.op or len(pattern.args) != len(expr.args):
            return self._miss(pattern, expr)
        swaps = pattern.op in COMMUTATIVE and all(isinstance(x, Expr) for x in expr.args)
        for args in (expr.args, expr.args[::-1]) if swaps else (expr.args,):
            before = dict(self.found), dict(self.numbers), list(self.inputs)
            pairs = zip(pattern.args, args, strict=True)
            # The part with more structure first: what it misses says more.
            ordered = sorted(pairs, key=lambda p: isinstance(p[0], Expr) and p[0].op == "var")
            if all(self._fits_argument(p, x, pattern, expr) for p, x in ordered):
                self.found[pattern] = expr
                return True
            self.found, self.numbers, self.inputs = before
        return False

    def _fits_argument(self, p: Any, x: Any, pattern: Expr, expr: Expr) -> bool:
        if isinstance(p, Expr) and isinstance(x, Expr):
            return self.fits(p, x)
        if isinstance(p, Expr) or isinstance(x, Expr):
            return self._miss(pattern, expr)
        if isinstance(x, InputNumber):
            self.inputs.append(x)
            x = x.value
        name = self.variables.get(p) if isinstance(p, (int, float)) else None
        if name is None:
            return bool(p == x) or self._miss(pattern, expr)
        is_number = isinstance(x, (int, float))
        return (is_number and self.numbers.setdefault(name, x) == x) or self._miss(pattern, expr)

    def _miss(self, pattern: Expr, expr: Expr) -> bool:
        # A leaf says least: it may stand there because the other order of two factors was tried.
        rank = len(self.found), expr.op != "leaf"
        if rank > self.most:
            self.most, self.misfit = rank, (pattern, expr)
        return False


def difference(matches: Iterable[Match], wanted: str) -> str:
    """How an expression differs from the pattern that has most of it; none has all of it."""
    match = max(matches, key=lambda m: m.most)
    assert match.misfit is not None
    pattern, expr = match.misfit
    return f"it has {expr} where {wanted} has {pattern.text(match.variables)}"
