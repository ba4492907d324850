"""The router of a mixture-of-experts layer: bfloat16 in, float32 logits out, never rounded in
between.

D[..., n] = sum_k A[..., k] * B[n, k] + bias[n]
"""

from __future__ import annotations

import functools

from torch import Tensor

from compile_ext.ops import batch_invariant, router_gemm_aten, router_reference, triton_support
from compile_ext.ops.contract import Gemm, OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.router_gemm_m1 import OP as ROUTER_GEMM_M1

NAME = "router_gemm"

OP = define_op(
    f"{NAME}(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    check=functools.partial(router_reference.check, NAME),
    fake=router_reference.fake,
    kernels=(
        Kernel("aten", why_not=router_gemm_aten.why_not, run=router_gemm_aten.run),  # cuBLAS
        Kernel("reference", why_not=never, run=router_reference.router_gemm_ref),
        batch_invariant.kernel(
            triton_support.run_of("router_gemm_triton"), router_reference.router_gemm_ref
        ),
    ),
    contract=OpContract(
        gemm=Gemm(a="a", b="b", bias="bias"),
        prewait_reads=("b", "bias"),
        m1_variant=ROUTER_GEMM_M1,
    ),
)


def router_gemm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T + bias`` in float32, from bfloat16 operands.

    Args:
        a: ``[..., k]`` bfloat16, any strides; the tokens M are all leading dimensions together.
        b: ``[n, k]`` bfloat16.
        bias: ``[n]`` bfloat16, float16 or float32.

    Returns:
        ``[..., n]`` float32, contiguous.

    Raises:
        DtypeError, RankError, ShapeError, DeviceError, GradError.
    """
    out: Tensor = OP(a, b, bias)
    return out
