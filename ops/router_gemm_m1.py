"""``router_gemm`` for exactly one token, the shape of decode.

A separate op, so that the choice shows in the graph: a kernel of its own could fetch weight tiles
before the PDL wait, which is worth most where a layer has one token. So far it runs the kernels of
router_gemm.
"""

from __future__ import annotations

from torch import Tensor

from compile_ext.ops import (
    batch_invariant,
    checks,
    router_gemm_aten,
    router_reference,
    triton_support,
)
from compile_ext.ops.contract import Gemm, OpContract, m_of
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.errors import ShapeError

NAME = "router_gemm_m1"


def _check(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    router_reference.check(NAME, a, b, bias)
    if not checks.same(m_of(a), 1):
        raise ShapeError(
            NAME,
            f"a of shape {list(a.shape)}",
            "one token: the leading dimensions multiply to 1",
            "call router_gemm",
        )


OP = define_op(
    f"{NAME}(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    check=_check,
    fake=router_reference.fake,
    kernels=(
        Kernel("aten", why_not=router_gemm_aten.why_not, run=router_gemm_aten.run),  # cuBLAS
        Kernel("reference", why_not=never, run=router_reference.router_gemm_ref),
        batch_invariant.kernel(
            triton_support.run_of("router_gemm_triton"), router_reference.router_gemm_ref
        ),
    ),
    contract=OpContract(gemm=Gemm(a="a", b="b", bias="bias"), prewait_reads=("b", "bias")),
)


def router_gemm_m1(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``router_gemm`` where the leading dimensions of ``a [..., k]`` multiply to 1.

    Args, returns and errors are router_gemm's; another M is a ShapeError.
    """
    out: Tensor = OP(a, b, bias)
    return out
