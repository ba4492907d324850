"""RMSNorm, then one FP8 scale for each 128 features of a token, as one kernel.

    r[m] = 1 / sqrt(mean_k(x[m, k]^2) + eps)
    y[m, k] = x[m, k] * r[m] * weight[k]            in float32, then rounded to x's dtype
    q, scale = quantize_fp8_groups(y)

Two reductions of different extent, over k and over 128, which Inductor leaves as two kernels (H200,
torch 2.11): the pair is the one quantization that it cannot fuse into its producer.
RMSNorm: Zhang and Sennrich, arXiv 1910.07467.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import checks, triton_support
from compile_ext.ops.contract import OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.quantize import blocks_of, quantize_fp8_groups
from compile_ext.ops.rms_norm import check_norm, rms_norm_ref

NAME = "rms_norm_quantize_fp8"


def rms_norm_quantize_fp8_ref(
    x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """The specification: the norm, rounded to x's dtype, then quantized."""
    return quantize_fp8_groups(rms_norm_ref(x, weight, eps, round_before_weight), use_ue8m0)


# torch hands on no default that ends a call: each function has it again.
def _check(
    x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool, use_ue8m0: bool = False
) -> None:
    check_norm(NAME, x, weight)


def fake_quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Empty ``q`` and ``scale`` of a ``[m, k]``, as ``quantize_fp8_groups`` lays them out."""
    m, groups = x.shape[0], blocks_of(x.shape[1])
    q = x.new_empty(x.shape, dtype=checks.FP8)
    return q, x.new_empty_strided((m, groups), (1, (m + 3) // 4 * 4), dtype=torch.float32)


def _fake(
    x: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    return fake_quantized(x)


OP = define_op(
    f"{NAME}(Tensor x, Tensor? weight, float eps, bool round_before_weight,"
    " bool use_ue8m0=False) -> (Tensor q, Tensor scale)",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel(
            "triton",
            triton_support.why_not,
            triton_support.run_of("rms_norm_quantize_fp8_triton"),
            prefetches=True,
        ),
        Kernel("reference", why_not=never, run=rms_norm_quantize_fp8_ref, compiles=False),
    ),
    contract=OpContract(prewait_reads=("weight",)),
)


def rms_norm_quantize_fp8(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    round_before_weight: bool = False,
    use_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of each row of x, quantized to FP8 in groups of 128.

    Args:
        x: ``[m, k]`` bfloat16, float16 or float32, any strides, k >= 1. m = 0 gives empty results.
        weight: ``[k]`` bfloat16, float16 or float32, or None for a norm without one. Gemma's is
            ``1 + weight``.
        eps: added to the mean of squares, which is in float32.
        round_before_weight: whether ``x * r`` is rounded to x's dtype before the weight multiplies:
            True for Llama, Qwen, DeepSeek in transformers, and vLLM; False for
            ``torch.nn.functional.rms_norm``, Gemma, OLMo 2 and gpt-oss.
        use_ue8m0: whether scales are powers of two, for checkpoints with ``scale_fmt: ue8m0``.

    Returns:
        ``q [m, k]`` float8_e4m3fn and ``scale [m, ceil(k/128)]`` float32 with strides
        ``(1, m rounded up to 4)``, as ``quantize_fp8_groups`` of the norm in x's dtype.

    Raises:
        DtypeError, RankError, ShapeError, DeviceError, GradError.
    """
    q, scale = OP(x, weight, eps, round_before_weight, use_ue8m0)
    return q, scale
