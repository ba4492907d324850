"""Say which kernel runs where M is known only at run time: one for each range of a measured table.

The op chooses on the host at each call. To know its choice, it is asked about fakes whose M is the
first and the last of a range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from compile_ext.ops.define import OpDefinition
from compile_ext.ops.device_tables import Ranges
from compile_ext.passes.values import bounds, range_text


def kernels_by_m(
    definition: OpDefinition, args: tuple[Any, ...], m: torch.SymInt, otherwise: str
) -> str:
    """``triton_small_m (M 2..16), deep_gemm (M 17..4096), else aten``; ``otherwise``, the first of
    the op's own order, where no table has the shape. Adds no guard."""
    ranges = definition.measured_ranges(args)
    low, high = bounds(m)
    parts: list[tuple[int, int, str]] = []
    for first, last in _inside(ranges, low, high):
        name = _name(definition, args, m, (first, last))
        if parts and parts[-1][2] == name and parts[-1][1] + 1 == first:
            first = parts.pop()[0]
        parts.append((first, last, name))
    if not parts:
        return otherwise
    texts = [f"{name} (M {range_text(first, last)})" for first, last, name in parts]
    whole = all(x[1] + 1 == y[0] for x, y in itertools.pairwise(parts))
    if not whole or parts[0][0] > max(low, 1) or parts[-1][1] != high:
        texts.append(f"else {otherwise}")
    return ", ".join(texts)


def _inside(ranges: Ranges | None, low: int, high: int | None) -> Iterator[tuple[int, int]]:
    for first, last in zip(ranges.firsts, ranges.lasts, strict=True) if ranges else ():
        first, last = max(first, low), last if high is None else min(last, high)
        if first <= last:
            yield first, last


def _name(
    definition: OpDefinition, args: tuple[Any, ...], m: torch.SymInt, ends: tuple[int, int]
) -> str:
    """A row's kernel need not take every M of it: both ends are asked."""
    kernels = [definition.kernel_for(*(_with(x, m, end) for x in args))[0] for end in ends]
    return " or ".join(dict.fromkeys(k.name for k in kernels))


def _with(value: Any, m: torch.SymInt, size: int) -> Any:
    """A fake, or a size, as it is where M is ``size``. Other symbols stay."""
    if isinstance(value, torch.SymInt):
        expr = value.node.expr.subs(m.node.expr, size)
        return int(expr) if expr.is_Integer else value
    if not isinstance(value, FakeTensor):
        return value
    shape, strides = ([_with(x, m, size) for x in xs] for xs in (value.shape, value.stride()))
    with value.fake_mode:
        made: Tensor = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return made
