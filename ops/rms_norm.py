"""RMSNorm as a kernel of its own, which lets its successor start early and may fetch its weight
while its predecessor runs (programmatic dependent launch).

    r[m] = 1 / sqrt(mean_k(x[m, k]^2) + eps)
    y[m, k] = x[m, k] * r[m] * weight[k]            in float32, then rounded to x's dtype

RMSNorm: Zhang and Sennrich, arXiv 1910.07467.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import checks, triton_support
from compile_ext.ops.contract import OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.errors import ShapeError

NAME = "rms_norm"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm_ref(x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool) -> Tensor:
    """The specification; bit for bit what the common spellings give in eager mode."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype).contiguous()  # a kernel writes rows, whatever the strides of x are
    if round_before_weight:
        y = y.to(x.dtype).float()
    return (y * weight.float()).to(x.dtype).contiguous()


def check_norm(op: str, x: Tensor, weight: Tensor | None) -> None:
    checks.dtype_in(op, "x", x, FLOATS)
    checks.rank_is(op, "x", x, 2)
    k = x.shape[1]
    if checks.is_zero(k):
        raise ShapeError(op, f"x of shape {list(x.shape)}", "k >= 1: a mean over k", "pass a row")
    if weight is not None:
        checks.dtype_in(op, "weight", weight, FLOATS)
        checks.shape_is(op, "weight", weight, (k,))
    checks.same_device(op, x=x, weight=weight)


def _check(x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool) -> None:
    check_norm(NAME, x, weight)


def _fake(x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool) -> Tensor:
    return x.new_empty(x.shape)


OP = define_op(
    f"{NAME}(Tensor x, Tensor? weight, float eps, bool round_before_weight) -> Tensor",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel(
            "triton",
            triton_support.why_not,
            triton_support.run_of("rms_norm_triton"),
            prefetches=True,
        ),
        Kernel("reference", why_not=never, run=rms_norm_ref, compiles=False),
    ),
    contract=OpContract(prewait_reads=("weight",)),
)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, round_before_weight: bool = False
) -> Tensor:
    """RMSNorm of each row of x.

    Args:
        x: ``[m, k]`` bfloat16, float16 or float32, any strides, k >= 1. m = 0 gives an empty
            result.
        weight: ``[k]`` bfloat16, float16 or float32, or None for a norm without one. Gemma's is
            ``1 + weight``.
        eps: added to the mean of squares, which is in float32.
        round_before_weight: whether ``x * r`` is rounded to x's dtype before the weight multiplies:
            True for Llama, Qwen, DeepSeek in transformers, and vLLM; False for
            ``torch.nn.functional.rms_norm``, Gemma, OLMo 2 and gpt-oss.

    Returns:
        ``[m, k]`` of x's dtype, contiguous.

    Raises:
        DtypeError, RankError, ShapeError, DeviceError, GradError.
    """
    out: Tensor = OP(x, weight, eps, round_before_weight)
    return out
