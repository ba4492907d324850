"""``rms_norm_router`` and the choice of experts behind it for one token, in one launch.

y, sum, logits = rms_norm_router(x, residual, weight, eps, round_before_weight, b, bias)
weights, ids = router_topk(logits, choice_bias, top_k, ...)
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from compile_ext.ops import checks, triton_support
from compile_ext.ops.contract import Gemm, OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.rms_norm_router import (
    PARAMETERS,
    check_router,
    fake_norm,
    rms_norm_router_ref,
    why_not_triton,
)
from compile_ext.ops.router_topk import (
    check_choice,
    fake_choice,
    router_topk_ref,
    why_too_many,
)

NAME = "rms_norm_router_topk"
Choice = tuple[Tensor, Tensor, Tensor, Tensor]


def rms_norm_router_topk_ref(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
    *choice: Any,
) -> Choice:
    """The specification: one after the other. ``choice``: what router_topk takes behind logits."""
    y, total, logits = rms_norm_router_ref(x, residual, weight, eps, round_before_weight, b, bias)
    return y, total, *router_topk_ref(logits, *choice)


def _check(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
    choice_bias: Tensor | None,
    *choice: Any,
) -> None:
    check_router(NAME, x, residual, weight, b, bias)
    check_choice(NAME, "choice_bias", choice_bias, b.shape[0], *choice)
    checks.same_device(NAME, x=x, choice_bias=choice_bias)


def _fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
    choice_bias: Tensor | None,
    top_k: int,
    *choice: Any,
) -> Choice:
    return *fake_norm(x, residual), *fake_choice(x, (1,), top_k)


def _why_not_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
    choice_bias: Tensor | None,
    top_k: int,
    *choice: Any,
) -> str | None:
    return why_not_triton(x) or why_too_many(b.shape[0], top_k)


OP = define_op(
    f"{NAME}({PARAMETERS}, Tensor? choice_bias, int top_k, str scores, int groups,"
    " int top_groups, float masked, bool renormalize, float scale)"
    " -> (Tensor y, Tensor sum, Tensor weights, Tensor ids)",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel("reference", why_not=never, run=rms_norm_router_topk_ref, compiles=False),
        # Behind the reference: it runs only where it is named. H200 (docs/benchmarks.md): slower
        # than rms_norm_router and router_topk at each of ten shapes, by 0.03 to 2.4 us.
        Kernel(
            "triton",
            _why_not_triton,
            triton_support.run_of("rms_norm_router_triton", "run_topk"),
            prefetches=True,
        ),
    ),
    contract=OpContract(
        gemm=Gemm(a="x", b="b", bias="bias"),
        prewait_reads=("weight", "b", "bias", "choice_bias"),
    ),
)


def rms_norm_router_topk(
    x: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    choice_bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    round_before_weight: bool = False,
    top_k: int,
    scores: str = "softmax",
    groups: int = 1,
    top_groups: int = 1,
    masked: float = -math.inf,
    renormalize: bool = True,
    scale: float = 1.0,
) -> Choice:
    """RMSNorm of one token, and the experts that its router chooses.

    Args:
        x, b, bias, residual, weight, eps, round_before_weight: as in ``rms_norm_router``.
        choice_bias: the ``bias`` of ``router_topk``, ``[n]``.
        top_k, scores, groups, top_groups, masked, renormalize, scale: as in ``router_topk``.

    Returns:
        ``y [1, k]`` and ``sum`` as in ``rms_norm_router``; ``weights [1, top_k]`` float32 and
        ``ids [1, top_k]`` int64 as in ``router_topk`` of its logits.

    Raises:
        DtypeError, RankError, ShapeError, ArgumentError, DeviceError, GradError.
    """
    y, total, weights, ids = OP(
        x, residual, weight, eps, round_before_weight, b, bias,
        choice_bias, top_k, scores, groups, top_groups, masked, renormalize, scale,
    )  # fmt: skip
    return y, total, weights, ids
