"""``rms_norm_router`` and ``rms_norm_router_topk``: one token in one launch. Imports Triton.

    r = 1 / sqrt(mean_k(x[k]^2) + eps);  logits[n] = r * sum_k x[k] * weight[k] * b[n, k] + bias[n]

A program has COLUMNS columns and all of K, so each computes the norm again and stores a part of
it. The weights come into registers before the wait for the kernel in front (programmatic dependent
launch, CUDA Programming Guide); the activation, and every store, come after it.
For a choice of experts, the program that is done last reads all logits: it knows by a counter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile_ext.ops.grid_counters import counter
from compile_ext.ops.rms_norm_router import fake_norm
from compile_ext.ops.router_topk import fake_choice
from compile_ext.ops.router_topk_triton import choose
from compile_ext.ops.triton_support import device_of, has_pdl

_STEP, _WARPS = 2048, 8  # 8 values a thread: one load of 16 bytes of bfloat16


@triton.jit  # type: ignore[untyped-decorator]
def _row(  # type: ignore[no-untyped-def]
    x, residual, step, K, stride_x, stride_residual,
    ADDS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """STEP values of x, or of the sum as it is stored; in float32."""
    k = (step * STEP + tl.arange(0, STEP)).to(tl.int64)
    value = tl.load(x + k * stride_x, mask=None if EVEN else k < K, other=None if EVEN else 0.0)
    dtype: tl.constexpr = x.dtype.element_ty
    value = value.to(tl.float32)
    if ADDS:
        other = tl.load(residual + k * stride_residual, mask=k < K, other=0.0).to(tl.float32)
        value = (value + other).to(dtype).to(tl.float32)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_router_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, b, bias, y, total, logits,
    counter, choice_bias, weights, ids,
    N, K, eps,
    stride_x, stride_residual, stride_weight, stride_b_n, stride_b_k, stride_bias,
    each, masked, factor, stride_choice_bias,
    ADDS: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUNDS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr, EVEN: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr, PART: tl.constexpr,
    CHOOSES: tl.constexpr, IS_SOFTMAX: tl.constexpr, HAS_CHOICE_BIAS: tl.constexpr,
    TOP_K: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    RENORMALIZE: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_n = n < N
    rows = b + n.to(tl.int64) * stride_b_n  # 64 bits: rows and columns can lie far apart
    held, norms = (), ()
    for step in tl.static_range(STEPS):
        k = (step * STEP + tl.arange(0, STEP)).to(tl.int64)
        mask = in_n[:, None] if EVEN else in_n[:, None] & (k < K)[None, :]
        at = rows[:, None] + (k * stride_b_k)[None, :]
        held += (tl.load(at, mask=mask, other=0.0),)  # type: ignore[assignment]
        if HAS_WEIGHT:
            norm = tl.load(weight + k * stride_weight, mask=k < K, other=0.0)
            norms += (norm,)  # type: ignore[assignment]
    added = tl.zeros((COLUMNS,), tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + n.to(tl.int64) * stride_bias, mask=in_n, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()  # whoever is launched to start early waits before it reads y
        gdc_wait()

    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros((COLUMNS, STEP), tl.float32)
    squares = tl.zeros((STEP,), tl.float32)
    for step in tl.static_range(STEPS):
        value = _row(x, residual, step, K, stride_x, stride_residual, ADDS, STEP, EVEN)
        squares += value * value
        if HAS_WEIGHT:
            value *= norms[step].to(tl.float32)
        sums += held[step].to(tl.float32) * value[None, :]
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    tl.store(logits + n, tl.sum(sums, 1) * scale + added, mask=in_n)

    # Each program knows the whole norm: they share the work of storing it.
    k = tl.program_id(0) * PART + tl.arange(0, PART)
    mine = k < K
    far = k.to(tl.int64)
    value = tl.load(x + far * stride_x, mask=mine, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + far * stride_residual, mask=mine, other=0.0).to(tl.float32)
        stored = value.to(dtype)
        tl.store(total + k, stored, mask=mine)
        value = stored.to(tl.float32)
    value *= scale
    if HAS_WEIGHT:
        if ROUNDS:
            value = value.to(dtype).to(tl.float32)
        value *= tl.load(weight + far * stride_weight, mask=mine, other=0.0).to(tl.float32)
    tl.store(y + k, value.to(dtype), mask=mine)

    if CHOOSES:
        tl.debug_barrier()  # all threads have stored their logits
        done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if done == tl.num_programs(0) - 1:
            tl.store(counter, 0)  # for the next launch, which waits for the end of this one
            j = tl.arange(0, EACH)[None, :]
            e = tl.arange(0, ROWS)[:, None] * each + j
            is_expert = (tl.arange(0, ROWS)[:, None] < GROUPS) & (j < each)
            extra = tl.zeros([ROWS, EACH], tl.float32)
            if HAS_CHOICE_BIAS:
                place = choice_bias + e.to(tl.int64) * stride_choice_bias
                extra += tl.load(place, mask=is_expert, other=0.0).to(tl.float32)
            # Past the L1, which knows nothing of other programs' stores.
            all_logits = tl.load(
                logits + e, mask=is_expert, other=-float("inf"), cache_modifier=".cg"
            )
            rank, p, is_chosen = choose(
                all_logits, extra, e, is_expert, masked, factor,
                IS_SOFTMAX, HAS_CHOICE_BIAS, TOP_K, GROUPS, TOP_GROUPS, RENORMALIZE, ROWS, EACH,
            )  # fmt: skip
            tl.store(weights + rank, p, mask=is_chosen)
            tl.store(ids + rank, e.to(tl.int64), mask=is_chosen)


def run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
    *,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    y, total = fake_norm(x, residual)
    logits = x.new_empty(1, b.shape[0], dtype=torch.float32)
    given = x, residual, weight, eps, round_before_weight, b, bias
    _launch(*given, y, total, logits, None, prefetch)
    return y, total, logits


def run_topk(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
    choice_bias: Tensor | None,
    top_k: int,
    scores: str,
    groups: int,
    top_groups: int,
    masked: float,
    renormalize: bool,
    scale: float,
    *,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, total = fake_norm(x, residual)
    logits = x.new_empty(1, b.shape[0], dtype=torch.float32)
    weights, ids = fake_choice(x, (1,), top_k)
    choice = {
        "choice_bias": choice_bias, "weights": weights, "ids": ids,
        "each": b.shape[0] // groups, "masked": masked, "factor": scale,
        "stride_choice_bias": 0 if choice_bias is None else choice_bias.stride(0),
        "IS_SOFTMAX": scores == "softmax", "HAS_CHOICE_BIAS": choice_bias is not None,
        "TOP_K": top_k, "GROUPS": groups, "TOP_GROUPS": top_groups, "RENORMALIZE": renormalize,
        "ROWS": triton.next_power_of_2(groups),
        "EACH": triton.next_power_of_2(b.shape[0] // groups),
    }  # fmt: skip
    given = x, residual, weight, eps, round_before_weight, b, bias
    _launch(*given, y, total, logits, choice if ids.numel() else None, prefetch)
    return y, total, weights, ids


_NO_CHOICE = {
    "choice_bias": None, "weights": None, "ids": None,
    "each": 0, "masked": 0.0, "factor": 0.0, "stride_choice_bias": 0,
    "IS_SOFTMAX": False, "HAS_CHOICE_BIAS": False, "TOP_K": 0, "GROUPS": 0, "TOP_GROUPS": 0,
    "RENORMALIZE": False, "ROWS": 1, "EACH": 1,
}  # fmt: skip


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    rounds: bool,
    b: Tensor,
    bias: Tensor | None,
    y: Tensor,
    total: Tensor,
    logits: Tensor,
    choice: dict[str, Any] | None,
    prefetch: bool,
) -> None:
    n, k = b.shape
    # H200: 4 columns for 2, which 160 columns prefer (2.07 and 1.92 us).
    columns = 4 if n >= 256 else 2
    programs = max(1, triton.cdiv(n, columns))  # the norm has to be stored where N is 0, too
    kernel: Any = _rms_norm_router_kernel
    with device_of(x):
        kernel[(programs,)](
            x, residual, weight, b, bias, y, total, logits,
            counter=counter(x) if choice else None,
            N=n, K=k, eps=eps,
            stride_x=x.stride(1), stride_residual=0 if residual is None else residual.stride(1),
            stride_weight=0 if weight is None else weight.stride(0),
            stride_b_n=b.stride(0), stride_b_k=b.stride(1),
            stride_bias=0 if bias is None else bias.stride(0),
            ADDS=residual is not None, HAS_WEIGHT=weight is not None, ROUNDS=rounds,
            HAS_BIAS=bias is not None, PDL=has_pdl(x), EVEN=k % _STEP == 0,
            COLUMNS=columns, STEP=_STEP, STEPS=triton.cdiv(k, _STEP),
            PART=triton.next_power_of_2(triton.cdiv(k, programs)),
            CHOOSES=choice is not None, **(choice or _NO_CHOICE),
            num_warps=_WARPS, launch_pdl=prefetch and has_pdl(x),
        )  # fmt: skip
