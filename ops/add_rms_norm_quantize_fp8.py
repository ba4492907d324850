"""``rms_norm_quantize_fp8`` of a residual stream: the sum, its RMSNorm and the FP8 quantization.

sum = x + residual
q, scale = rms_norm_quantize_fp8(sum, weight, eps, round_before_weight, use_ue8m0)
"""

from __future__ import annotations

from torch import Tensor

from compile_ext.ops import triton_support
from compile_ext.ops.add_rms_norm import check_sum
from compile_ext.ops.contract import OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.rms_norm_quantize_fp8 import fake_quantized, rms_norm_quantize_fp8_ref

NAME = "add_rms_norm_quantize_fp8"


def add_rms_norm_quantize_fp8_ref(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    use_ue8m0: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The specification: the norm is that of the sum as it is rounded to x's dtype."""
    # A kernel writes rows, whatever the strides of its inputs are.
    total = (x + residual).contiguous()
    normed = rms_norm_quantize_fp8_ref(total, weight, eps, round_before_weight, use_ue8m0)
    return *normed, total


def _check(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    use_ue8m0: bool = False,
) -> None:
    check_sum(NAME, x, residual, weight)


def _fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    use_ue8m0: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return *fake_quantized(x), x.new_empty(x.shape)


OP = define_op(
    f"{NAME}(Tensor x, Tensor residual, Tensor? weight, float eps, bool round_before_weight,"
    " bool use_ue8m0=False) -> (Tensor q, Tensor scale, Tensor sum)",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel(
            "triton",
            triton_support.why_not,
            triton_support.run_of("rms_norm_quantize_fp8_triton", "run_add"),
            prefetches=True,
        ),
        Kernel("reference", why_not=never, run=add_rms_norm_quantize_fp8_ref, compiles=False),
    ),
    contract=OpContract(prewait_reads=("weight",)),
)


def add_rms_norm_quantize_fp8(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    round_before_weight: bool = False,
    use_ue8m0: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of ``x + residual``, quantized to FP8 in groups of 128, and the sum.

    Args:
        x: ``[m, k]`` bfloat16, float16 or float32, any strides, k >= 1.
        residual: ``[m, k]`` of x's dtype, any strides.
        weight, eps, round_before_weight, use_ue8m0: as in ``rms_norm_quantize_fp8``.

    Returns:
        ``q`` and ``scale`` as ``rms_norm_quantize_fp8`` of the sum gives them, and
        ``sum [m, k]``, ``x + residual`` in x's dtype, contiguous: the new residual.

    Raises:
        DtypeError, RankError, ShapeError, DeviceError, GradError.
    """
    q, scale, total = OP(x, residual, weight, eps, round_before_weight, use_ue8m0)
    return q, scale, total
