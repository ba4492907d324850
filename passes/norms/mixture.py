"""Attention residuals before a norm: ``attn_residual`` in the place of both.

    before: v = cat((blocks, x.unsqueeze(1)), 1); mixed = ... v ... query ...; y = rms_norm(mixed)
    after:  y, mixed = attn_residual(x, blocks, query, ...)

Of a v that is spelled otherwise the op reads parts; the copy that made it stays then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.fx import Node

from compile_ext.ops.attn_residual import OP as ATTN_RESIDUAL
from compile_ext.ops.attn_residual import mix_ref
from compile_ext.passes.context import PassContext
from compile_ext.passes.expressions.expression import (
    Expr,
    InputNumber,
    Match,
    Table,
    shortest,
    to_float32,
)
from compile_ext.passes.expressions.nodes import NodeExpressions
from compile_ext.passes.expressions.trace import expressions_of
from compile_ext.passes.norms.patterns import Norm, norm_dtype
from compile_ext.passes.norms.place_op import norm_arguments, place_op, reshaped, why_not_placed
from compile_ext.passes.norms.region import Region, Writers, find_region, with_origins
from compile_ext.passes.readers import read_cat
from compile_ext.passes.values import dtype_name, same_size, tensor

_M, _L, _K, _EPS = 7, 13, 1009, to_float32(0.123456789)
_NUMBERS = {_L: "l", _K: "k", _EPS: "eps"}


@dataclass(frozen=True)
class Mixture:
    """What attention residuals read: ``inputs`` (``v [m, l, k]`` and ``query``), ``key_eps``;
    ``numbers``: those of it that are inputs of the graph."""

    inputs: dict[str, Expr]
    key_eps: float
    length: int
    numbers: list[InputNumber]


def read_mixture(mixed: Expr) -> Mixture | None:
    """The attention residuals that give ``mixed``, or None."""
    pattern, variables = _pattern(norm_dtype(mixed))
    match = Match(dict(_NUMBERS))
    if not match.fits(pattern, mixed):
        return None
    inputs = {name: match.found[x] for name, x in variables.items()}
    length = int(match.numbers["l"])
    return Mixture(inputs, shortest(match.numbers["eps"]), length, match.inputs)


@lru_cache
def _pattern(dtype: torch.dtype) -> tuple[Expr, dict[str, Expr]]:
    def mixture(v: Tensor, query: Tensor) -> tuple[Tensor, ...]:
        return (mix_ref(v, query, _EPS),)

    table = Table()
    inputs = {"v": torch.empty(_M, _L, _K, dtype=dtype), "query": torch.empty(_K)}
    (mixed,) = expressions_of(mixture, inputs, table)
    return mixed, {name: table("var", name) for name in inputs}


def find_mixture(starts: list[Node], exprs: NodeExpressions, norm: Norm) -> Region | None:
    """The region of a norm and of the attention residuals that it reads, if it reads such."""
    mixed = norm.inputs["x"]
    mixture = read_mixture(mixed)
    if mixture is None:
        return None
    weight = {name: x for name, x in norm.inputs.items() if name == "weight"}
    return find_region(
        starts,
        exprs,
        norm,
        {**mixture.inputs, **weight},
        kinds={norm.y: norm.dtype, mixed: norm.dtype},
        parts={"attention residuals": mixed, "norm": norm.y},
        numbers=(*mixture.numbers, *norm.numbers),
    )


def place_mixture(
    region: Region, writers: Writers, replaced: dict[Node, Node], ctx: PassContext
) -> Node | str:
    """The call of ``attn_residual`` in the place of a region, or the reason why not; ``replaced``
    as in ``place_norm``."""
    region.follow(replaced)
    y, mixed = region.norm.y, region.norm.inputs["x"]
    mixture = read_mixture(mixed)
    assert mixture is not None
    reason = _why_unfit(region, mixture) or why_not_placed(region, writers, ctx)
    if reason is not None:
        return reason
    results = {node: 0 if region.results[node] is y else 1 for node in region.ends()}
    first = (y, mixed) if 1 in results.values() else (y,)
    before = min(x for x in region.computed() if region.results.get(x) in first)
    if not all(x < before for x in region.nodes_of.values()):
        return "others read the mixture before the norm's weight is there"
    make = partial(_call, region, mixture, _parts(region, writers), ctx)
    placed = place_op(region, make, before, results, region.nodes_of["v"], ctx)
    if isinstance(placed, str):
        return placed
    replaced.update(placed.results)
    return placed.call


def _why_unfit(region: Region, mixture: Mixture) -> str | None:
    norm, out = region.norm, tensor(region.starts[0])
    v, query, weight = (tensor(region.nodes_of.get(name)) for name in ("v", "query", "weight"))
    assert v is not None
    assert query is not None
    assert out is not None
    if v.dtype != norm.dtype:
        return f"the layers' results are {dtype_name(v)}, the normed activation {dtype_name(out)}"
    for name, x in (("query", query), ("weight", weight)):
        if x is not None and not x.numel() == x.shape[-1] == norm.k:
            return f"its {name} is {list(x.shape)}, not [{norm.k}]"
    if any(x is not None and x.device != out.device for x in (v, query, weight)):
        return "its inputs are on different devices"
    if tuple(v.shape[-2:]) != (mixture.length, norm.k):
        return f"the layers' results are {list(v.shape)}, not [..., {mixture.length}, {norm.k}]"
    if not same_size(v.numel(), out.numel() * mixture.length):
        return "the mixture is repeated before it is normed"
    return None


def _parts(region: Region, writers: Writers) -> tuple[Node, Node] | None:
    """``x`` and ``blocks`` of a v that is made of them, where they still hold what they held."""
    v = region.nodes_of["v"]
    cat, whole = read_cat(v), tensor(v)
    if cat is None or whole is None or len(cat.tensors) != 2 or cat.dim != whole.dim() - 2:
        return None
    blocks, last = cat.tensors
    newest = tensor(last)
    if newest is None or newest.shape[-2] != 1 or newest.dtype != whole.dtype:
        return None
    kept = set(region.reads)
    region.reads |= {y for x in cat.tensors for y in with_origins(x, region.exprs)}
    if region.why_not_unwritten(writers, since=v) is not None:
        region.reads = kept
        return None
    return _origin(last, region.exprs), blocks


def _origin(x: Node, exprs: NodeExpressions) -> Node:
    """What a node is a view of, or a copy."""
    whole = tensor(x)
    assert whole is not None
    same = [
        node
        for node in exprs.nodes(exprs.of(x))
        if (found := tensor(node)) is not None
        and found.dtype == whole.dtype
        and same_size(found.numel(), whole.numel())
    ]
    return min(same)


def _call(
    region: Region,
    mixture: Mixture,
    parts: tuple[Node, Node] | None,
    ctx: PassContext,
    before: Node,
) -> Node:
    k, length = region.norm.k, mixture.length
    if parts is None:
        v = reshaped(region.nodes_of["v"], before, ctx, -1, length, k)
        x = ctx.insert(before, "select", v, 1, length - 1)
        blocks = ctx.insert(before, "narrow", v, 1, 0, length - 1)
    else:
        x = reshaped(parts[0], before, ctx, -1, k)
        blocks = reshaped(parts[1], before, ctx, -1, length - 1, k)
    query = reshaped(region.nodes_of["query"], before, ctx, k)
    norm = norm_arguments(region, before, ctx)
    like = region.starts[0]
    return ctx.insert(before, ATTN_RESIDUAL, x, blocks, query, mixture.key_eps, *norm, like=like)
