"""``router_gemm`` of few tokens in CuTe DSL: the weight is loaded while the kernel in front runs.

The host's side: what can run, with which compile-time parameters, and the launch. One token goes to
``router_dot_cute_kernel``, more to ``router_mma_cute_kernel``.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compile_ext.ops import checks, cute_support, router_cute_parameters, tma_rows
from compile_ext.ops.contract import m_of
from compile_ext.ops.cute_kernel import CuteKernel
from compile_ext.ops.router_cute_parameters import VECTOR, DotParameters, MmaParameters

MAX_TOKENS = 128
# Of a call: each tile of tokens reads the weight anew. H200, with the norm, times as fast as
# cuBLAS: 1.2 at 64 x 256 and K = 7168, 0.9 at 64 x 384; 1.4 at 16 x 896, 0.9 at 32 x 896.
MAX_LOGITS = 16384
DOT = CuteKernel("router_dot_cute_kernel", "RouterDot", "PPPPPPPPqfi")
MMA = CuteKernel("router_mma_cute_kernel", "RouterMma", "PPPPqqii")


@functools.lru_cache(maxsize=4096)  # asked twice in each call
def parameters(
    m: int, n: int, k: int, bias: str | None
) -> tuple[CuteKernel, DotParameters | MmaParameters] | str:
    """The kernel of a call and its compile-time parameters, or why there is none."""
    if not m or not n or not k:
        return "a dimension is 0"
    if k % VECTOR:
        return f"takes K in multiples of {VECTOR}, K is {k}"
    if m > MAX_TOKENS or m * n > MAX_LOGITS:
        return f"takes up to {MAX_TOKENS} tokens and {MAX_LOGITS} logits, M is {m}, N is {n}"
    if m > 1:
        found = router_cute_parameters.mma(m, n, k, bias)
        return (MMA, found) if found else _TOO_WIDE.format(k)
    split = router_cute_parameters.split(n, k, has_norm=False)
    return (DOT, DotParameters(k, split, bias)) if split else _TOO_WIDE.format(k)


_TOO_WIDE = "a row of K = {} does not fit into the registers of a cluster"


def why_not(a: Tensor, b: Tensor, bias: Tensor | None) -> str | None:
    reason = cute_support.why_not(a)
    if reason:
        return reason
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return "takes bfloat16"
    m, n, k = checks.known(m_of(a)), *map(checks.known, b.shape)
    if m is None or n is None or k is None:
        return "chooses its configuration by M, N and K, of which one is symbolic"
    found = parameters(m, n, k, name_of(bias))
    if isinstance(found, str):
        return found
    if a.stride(-1) != 1 or b.stride(-1) != 1 or (bias is not None and bias.stride(0) != 1):
        return "takes contiguous rows"
    return tma_rows.why_not(a=a.reshape(m, k), b=b) or found[0].why_not(a, found[1])


def run(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    *,
    prefetch: bool = False,
    chosen: DotParameters | MmaParameters | None = None,
) -> Tensor:
    n, k = b.shape
    m = m_of(a)
    assert isinstance(m, int)
    out = a.new_empty(*a.shape[:-1], n, dtype=torch.float32)
    rows = a.reshape(m, k)
    at, row = address(bias), b.stride(0)
    p = chosen or _chosen(m, n, k, name_of(bias))
    if isinstance(p, DotParameters):
        # No norm, so no residual, weight, y and sum.
        arguments = rows.data_ptr(), 0, 0, b.data_ptr(), at, 0, 0, out.data_ptr(), row, 0.0, n
        DOT.launch(a, p, p.grid(n), *arguments, pdl=prefetch)
    else:
        strides = rows.stride(0), row
        pointers = rows.data_ptr(), b.data_ptr(), at, out.data_ptr()
        MMA.launch(a, p, p.grid(m, n), *pointers, *strides, m, n, pdl=prefetch)
    return out


def _chosen(m: int, n: int, k: int, bias: str | None) -> DotParameters | MmaParameters:
    found = parameters(m, n, k, bias)
    assert not isinstance(found, str)  # why_not saw to it
    return found[1]


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def name_of(x: Tensor | None) -> str | None:
    """Of its dtype."""
    return None if x is None else str(x.dtype).removeprefix("torch.")
