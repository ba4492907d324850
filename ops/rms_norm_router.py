"""RMSNorm and the router behind it for one token, in one launch.

    sum[k] = x[k] + residual[k]                          rounded to x's dtype
    n[k] = sum[k] / sqrt(mean_k(sum[k]^2) + eps) * weight[k]
    y[k] = n[k]                                          rounded as rms_norm rounds it
    logits[e] = sum_k n[k] * b[e, k] + bias[e]           of n in float32, not rounded

Programs divide the experts, and each computes the norm again: worth it for one row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import checks, rms_norm_router_cute, router_gemm_spec, triton_support
from compile_ext.ops.add_rms_norm import add_rms_norm_ref, check_sum
from compile_ext.ops.contract import Gemm, OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.errors import ShapeError
from compile_ext.ops.rms_norm import check_norm, rms_norm_ref

NAME = "rms_norm_router"
# Of the Triton kernel, whose programs hold whole rows: 64 registers a row.
MAX_FEATURES = 16384
PARAMETERS = (
    "Tensor x, Tensor? residual, Tensor? weight, float eps, bool round_before_weight,"
    " Tensor b, Tensor? bias"
)


def rms_norm_router_ref(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification: the two ops, but for the rounding of the activation between them."""
    if residual is None:
        row, total = x, x.new_empty(0)
        y = rms_norm_ref(x, weight, eps, round_before_weight)
    else:
        y, total = add_rms_norm_ref(x, residual, weight, eps, round_before_weight)
        row = total
    normed = rms_norm_ref(row.float(), weight, eps, False)
    return y, total, router_gemm_spec.router_gemm_ref(normed, b, bias)


def check_router(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    b: Tensor,
    bias: Tensor | None,
) -> None:
    if residual is None:
        check_norm(op, x, weight)
    else:
        check_sum(op, x, residual, weight)
    if not checks.same(x.shape[0], 1):
        fix = "call rms_norm or add_rms_norm, then router_gemm"
        raise ShapeError(op, f"x of shape {list(x.shape)}", "one token: [1, k]", fix)
    checks.dtype_in(op, "b", b, (torch.bfloat16, torch.float32))
    checks.rank_is(op, "b", b, 2)
    checks.shape_is(op, "b", b, (b.shape[0], x.shape[1]))
    checks.bias_fits(op, bias, b.shape[0])
    checks.same_device(op, x=x, b=b, bias=bias)


def fake_norm(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Empty ``y`` and ``sum``."""
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)


def _check(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
) -> None:
    check_router(NAME, x, residual, weight, b, bias)


def _fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.new_empty(1, b.shape[0], dtype=torch.float32)
    return *fake_norm(x, residual), logits


def why_not_triton(x: Tensor, *_: object) -> str | None:
    reason = triton_support.why_not(x)
    if reason is None and not checks.at_most(x.shape[1], MAX_FEATURES):
        reason = f"takes K up to {MAX_FEATURES}, K is {x.shape[1]}"
    return reason


KERNELS = (
    # H200 (docs/benchmarks.md): 1.1 to 1.2 times as fast as the Triton kernel.
    Kernel(
        "cute",
        rms_norm_router_cute.why_not,
        rms_norm_router_cute.run,
        prefetches=True,
    ),
    Kernel(
        "triton",
        why_not_triton,
        triton_support.run_of("rms_norm_router_triton"),
        prefetches=True,
    ),
    Kernel("reference", why_not=never, run=rms_norm_router_ref, compiles=False),
)

OP = define_op(
    f"{NAME}({PARAMETERS}) -> (Tensor y, Tensor sum, Tensor logits)",
    check=_check,
    fake=_fake,
    kernels=KERNELS,
    contract=OpContract(
        gemm=Gemm(a="x", b="b", bias="bias"), prewait_reads=("weight", "b", "bias")
    ),
)


def rms_norm_router(
    x: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of one token, and the logits of a router that reads it.

    Args:
        x: ``[1, k]`` bfloat16, float16 or float32, any strides, k >= 1.
        b: ``[n, k]`` bfloat16 or float32, any strides: the router's weight.
        bias: ``[n]`` bfloat16, float16 or float32.
        residual: ``[1, k]`` of x's dtype, added to x before the norm.
        weight, eps, round_before_weight: as in ``rms_norm``.

    Returns:
        ``y [1, k]`` as ``rms_norm`` gives it; ``sum [1, k]``, ``x + residual`` in x's dtype, of
        shape ``[0]`` where there is no residual; ``logits [1, n]`` float32. The logits are those of
        the norm before it is rounded: closer to exact than ``router_gemm(y, b, bias)``, from which
        they differ by up to 2^-8 of ``sum_k |y[k] * b[e, k]|`` in bfloat16 (twice that with
        ``round_before_weight``).

    Raises:
        DtypeError, RankError, ShapeError, DeviceError, GradError.
    """
    y, total, logits = OP(x, residual, weight, eps, round_before_weight, b, bias)
    return y, total, logits
