"""``rms_norm`` of a residual stream: the sum and its RMSNorm, in one kernel.

sum = x + residual
y = rms_norm(sum, weight, eps, round_before_weight)
"""

from __future__ import annotations

from torch import Tensor

from compile_ext.ops import checks, triton_support
from compile_ext.ops.contract import OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.rms_norm import check_norm, rms_norm_ref

NAME = "add_rms_norm"


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    """The specification: the norm is that of the sum as it is rounded to x's dtype."""
    total = (x + residual).contiguous()  # a kernel writes rows, whatever the strides of x are
    return rms_norm_ref(total, weight, eps, round_before_weight), total


def check_sum(op: str, x: Tensor, residual: Tensor, weight: Tensor | None) -> None:
    check_norm(op, x, weight)
    checks.dtype_in(op, "residual", residual, (x.dtype,))
    checks.shape_is(op, "residual", residual, tuple(x.shape))
    checks.same_device(op, x=x, residual=residual)


def _check(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool
) -> None:
    check_sum(NAME, x, residual, weight)


def _fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


OP = define_op(
    f"{NAME}(Tensor x, Tensor residual, Tensor? weight, float eps, bool round_before_weight)"
    " -> (Tensor y, Tensor sum)",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel(
            "triton",
            triton_support.why_not,
            triton_support.run_of("rms_norm_triton", "run_add"),
            prefetches=True,
        ),
        Kernel("reference", why_not=never, run=add_rms_norm_ref, compiles=False),
    ),
    contract=OpContract(prewait_reads=("weight",)),
)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``x + residual``, and the sum.

    Args:
        x: ``[m, k]`` bfloat16, float16 or float32, any strides, k >= 1.
        residual: ``[m, k]`` of x's dtype, any strides.
        weight, eps, round_before_weight: as in ``rms_norm``.

    Returns:
        ``y [m, k]``, ``rms_norm`` of the sum, and ``sum [m, k]``, ``x + residual`` in x's dtype:
        the new residual. Both contiguous.

    Raises:
        DtypeError, RankError, ShapeError, DeviceError, GradError.
    """
    y, total = OP(x, residual, weight, eps, round_before_weight)
    return y, total
