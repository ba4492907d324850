"""What ``router_gemm`` and its M == 1 variant share: reference, checks, fake, kernels, contract."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import (
    batch_invariant,
    block_scaled_reference,
    checks,
    float32_matmul,
    router_gemm_aten,
    router_gemm_cute,
    triton_support,
)
from compile_ext.ops.contract import Gemm, OpContract, m_of
from compile_ext.ops.define import Kernel, never
from compile_ext.ops.errors import RankError

# Of the Triton kernel for few: each one is a pass over the activation and the weight's registers.
MAX_TOKENS = 8


def router_gemm_ref(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    product: block_scaled_reference.Product | None = None,
) -> Tensor:
    """The specification: products and sum in float32. ``product`` multiplies ``[m, k]`` by
    ``[k, n]`` where it is not for ``linear`` to choose."""
    # float64 where BLAS would round float32 operands: the specification knows no TF32.
    wide = torch.float64 if float32_matmul.why_rounded(a, b) else torch.float32
    x, w, added = a.to(wide), b.to(wide), None if bias is None else bias.to(wide)
    if product is None:
        return torch.nn.functional.linear(x, w, added).float()
    out = product(x.reshape(m_of(x), x.shape[-1]), w.t())
    return (out if added is None else out + added).view(*a.shape[:-1], w.shape[0]).float()


def check(op: str, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    for name, x in (("a", a), ("b", b)):
        checks.dtype_in(op, name, x, (torch.bfloat16, torch.float32))
    if a.dim() == 0:
        raise RankError(op, "a of shape []", "at least 1 dimension", "pass a as [..., k]")
    checks.rank_is(op, "b", b, 2)
    checks.same_device(op, a=a, b=b, bias=bias)
    checks.same_k(op, a, b)
    checks.bias_fits(op, bias, b.shape[0])


def fake(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[0], dtype=torch.float32)


def _why_not_small_m(a: Tensor, b: Tensor, bias: Tensor | None) -> str | None:
    reason = triton_support.why_not(a)
    if reason is None and not checks.at_most(m_of(a), MAX_TOKENS):
        reason = f"takes up to {MAX_TOKENS} tokens, M is {m_of(a)}"
    return reason


KERNELS = (
    # H200, norm and router of one token (docs/benchmarks.md): 2.0 to 4.8 us, with the Triton kernel
    # 1.9 to 5.1, with cuBLAS 7.5 to 10.2. What no table has measured runs in this order.
    Kernel(
        "cute",
        router_gemm_cute.why_not,
        router_gemm_cute.run,
        prefetches=True,
    ),
    Kernel(
        "triton_small_m",
        _why_not_small_m,
        triton_support.run_of("router_gemm_small_m_triton"),
        prefetches=True,
    ),
    # cuBLAS
    Kernel("aten", why_not=router_gemm_aten.why_not, run=router_gemm_aten.run, compiles=False),
    Kernel("reference", why_not=never, run=router_gemm_ref, compiles=False),
    batch_invariant.kernel(triton_support.run_of("router_gemm_triton"), router_gemm_ref),
)

CONTRACT = OpContract(gemm=Gemm(a="a", b="b", bias="bias"), prewait_reads=("b", "bias"))
