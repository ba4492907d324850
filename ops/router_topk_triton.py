"""``router_topk``: one row a program, held in registers. Imports Triton.

Values are compared as int32 of the same order, so that NaN has a place in it. A round takes the
largest, and of equal ones the first: two reductions of 32 bits, each one instruction of a warp
(``redux.sync``, SM80); one of 64 bits, with the index in the low half, would take ten shuffles.
An expert learns its rank, and stores its own weight and index: nothing is gathered.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile_ext.ops.router_topk import TINY, fake_choice
from compile_ext.ops.triton_support import device_of, has_pdl

_TINY = tl.constexpr(TINY)
_LARGEST = tl.constexpr(0x7FFFFFFF)
_TAKEN = tl.constexpr(-0x80000000)  # below every value: minus infinity is -0x7F800001
_ELEMENTS_OF_A_WARP = 512  # 16 a thread


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """float32 as int32 of the same order: -0.0 is 0.0, and NaN the largest, as for torch.topk."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, _LARGEST, bits ^ ((bits >> 31) & _LARGEST))


@triton.jit
def _value(key):  # type: ignore[no-untyped-def]
    """The float32 of ``_ordered``."""
    return (key ^ ((key >> 31) & _LARGEST)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _is_in_best_group(  # type: ignore[no-untyped-def]
    key, n, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, ROWS: tl.constexpr
):
    """``[ROWS, 1]``: which rows of ``key [ROWS, EACH]`` have the largest sums of their best two."""
    best = tl.max(key, 1)
    at = tl.min(tl.where(key == best[:, None], n, _LARGEST), 1)
    second = tl.max(tl.where(n == at[:, None], _TAKEN, key), 1)
    group = tl.arange(0, ROWS)
    score = tl.where(group < GROUPS, _ordered(_value(best) + _value(second)), _TAKEN)
    # Few groups: each counts those before it.
    mine, other = score[:, None], score[None, :]
    is_before = (other > mine) | ((other == mine) & (group[None, :] < group[:, None]))
    return (tl.sum(is_before.to(tl.int32), 1) < TOP_GROUPS)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def choose(  # type: ignore[no-untyped-def]
    x, added, n, mask, masked, scale,
    IS_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, TOP_K: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The rank of each expert ``[ROWS, EACH]``, TOP_K of those that are not chosen; its weight; and
    whether it is chosen."""
    # The logits decide alone: the largest is then among the chosen, and what divides cancels out.
    BY_LOGITS: tl.constexpr = not HAS_BIAS and GROUPS == 1
    if IS_SOFTMAX:
        p = tl.exp(x - _value(tl.max(_ordered(x))))
        if not (BY_LOGITS and RENORMALIZE):
            p /= tl.sum(tl.where(mask, p, 0.0))
    else:
        p = tl.sigmoid(x)
    if BY_LOGITS:
        choice = x
    elif HAS_BIAS:
        choice = p + added
    else:
        choice = p
    key = tl.where(mask, _ordered(choice), _TAKEN)
    if GROUPS > 1:
        stays = _is_in_best_group(key, n, GROUPS, TOP_GROUPS, ROWS)
        outside = _ordered(tl.full([ROWS, EACH], 0.0, tl.float32) + masked)
        key = tl.where(mask & ~stays, outside, key)

    rank = tl.full([ROWS, EACH], TOP_K, tl.int32)
    for i in range(TOP_K):
        at = tl.min(tl.where(key == tl.max(key), n, _LARGEST))
        rank = tl.where(n == at, i, rank)
        key = tl.where(n == at, _TAKEN, key)
    is_chosen = (rank < TOP_K) & mask  # past the end of a group, n is one of the next group's
    if RENORMALIZE:
        p /= tl.sum(tl.where(is_chosen, p, 0.0)) + _TINY
    return rank, p * scale, is_chosen


@triton.jit  # type: ignore[untyped-decorator]
def _router_topk_kernel(  # type: ignore[no-untyped-def]
    logits, bias, weights, ids,
    each, masked, scale,
    stride_m, stride_n, stride_bias,
    IS_SOFTMAX: tl.constexpr, HAS_BIAS: tl.constexpr, TOP_K: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
    ROWS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, EACH)[None, :]
    n = tl.arange(0, ROWS)[:, None] * each + j  # [ROWS, EACH]
    mask = (tl.arange(0, ROWS)[:, None] < GROUPS) & (j < each)
    added = tl.zeros([ROWS, EACH], tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + n.to(tl.int64) * stride_bias, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(logits + row * stride_m + n.to(tl.int64) * stride_n, mask=mask, other=-float("inf"))

    rank, p, is_chosen = choose(
        x, added, n, mask, masked, scale,
        IS_SOFTMAX, HAS_BIAS, TOP_K, GROUPS, TOP_GROUPS, RENORMALIZE, ROWS, EACH,
    )  # fmt: skip
    out = row * TOP_K + rank
    tl.store(weights + out, p, mask=is_chosen)
    tl.store(ids + out, n.to(tl.int64), mask=is_chosen)


def run(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scores: str,
    groups: int,
    top_groups: int,
    masked: float,
    renormalize: bool,
    scale: float,
    *,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor]:
    n = logits.shape[-1]
    weights, ids = fake_choice(logits, logits.shape[:-1], top_k)
    if not ids.numel():
        return weights, ids
    rows = logits.reshape(-1, n)
    g, each = triton.next_power_of_2(groups), triton.next_power_of_2(n // groups)
    kernel: Any = _router_topk_kernel
    with device_of(logits):
        kernel[(rows.shape[0],)](
            rows, bias, weights, ids,
            n // groups, masked, scale,
            *rows.stride(), 0 if bias is None else bias.stride(0),
            IS_SOFTMAX=scores == "softmax", HAS_BIAS=bias is not None, TOP_K=top_k,
            GROUPS=groups, TOP_GROUPS=top_groups, RENORMALIZE=renormalize, PDL=has_pdl(logits),
            ROWS=g, EACH=each,
            num_warps=min(4, max(1, g * each // _ELEMENTS_OF_A_WARP)),
            launch_pdl=prefetch and has_pdl(logits),
        )  # fmt: skip
    return weights, ids
