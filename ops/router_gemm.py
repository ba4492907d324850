"""The router of a mixture-of-experts layer: float32 logits of bfloat16 or float32 operands, never
rounded in between.

D[..., n] = sum_k A[..., k] * B[n, k] + bias[n]
"""

from __future__ import annotations

import dataclasses
import functools

from torch import Tensor

from compile_ext.ops import router_gemm_spec
from compile_ext.ops.define import define_op
from compile_ext.ops.router_gemm_m1 import OP as ROUTER_GEMM_M1

NAME = "router_gemm"

OP = define_op(
    f"{NAME}(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    check=functools.partial(router_gemm_spec.check, NAME),
    fake=router_gemm_spec.fake,
    kernels=router_gemm_spec.KERNELS,
    contract=dataclasses.replace(router_gemm_spec.CONTRACT, m1_variant=ROUTER_GEMM_M1),
)


def router_gemm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T + bias``: products and sums in float32, never in TF32, whatever torch may use.

    Args:
        a: ``[..., k]`` bfloat16 or float32, any strides; the tokens M are all leading dimensions
            together.
        b: ``[n, k]`` bfloat16 or float32, of either with either ``a``.
        bias: ``[n]`` bfloat16, float16 or float32.

    Returns:
        ``[..., n]`` float32, contiguous.

    Raises:
        DtypeError, RankError, ShapeError, DeviceError, GradError.
    """
    out: Tensor = OP(a, b, bias)
    return out
