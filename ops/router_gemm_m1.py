"""``router_gemm`` for exactly one token, the shape of decode.

A separate op, so that the choice shows in the graph, and ``fuse_router`` finds it there. It has the
kernels of router_gemm, which look at M themselves.
"""

from __future__ import annotations

from torch import Tensor

from compile_ext.ops import checks, router_gemm_spec
from compile_ext.ops.contract import m_of
from compile_ext.ops.define import define_op
from compile_ext.ops.errors import ShapeError

NAME = "router_gemm_m1"


def _check(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    router_gemm_spec.check(NAME, a, b, bias)
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
    fake=router_gemm_spec.fake,
    kernels=router_gemm_spec.KERNELS,
    contract=router_gemm_spec.CONTRACT,
)


def router_gemm_m1(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``router_gemm`` where the leading dimensions of ``a [..., k]`` multiply to 1.

    Args, returns and errors are router_gemm's; another M is a ShapeError.
    """
    out: Tensor = OP(a, b, bias)
    return out
