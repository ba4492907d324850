"""``router_gemm`` of one token in CuTe DSL: its weight is loaded while the kernel in front runs.

The host's side: which compile-time parameters a call has, and its launch. The kernel itself is in
``router_gemm_cute_kernel``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compile_ext.ops import checks, cute_support
from compile_ext.ops.compile_unit import CompileUnit, Site, Target
from compile_ext.ops.contract import m_of
from compile_ext.ops.cute_kernel import CuteKernel

VECTOR = 8  # bfloat16 values in 16 bytes, the most that a thread loads at once


class Parameters(NamedTuple):
    """Args:
    k: input features, a multiple of VECTOR.
    columns: output features of a CTA.
    threads: of a CTA; they divide K.
    prefetch: tiles of ``threads`` vectors of the weight that are loaded before the PDL wait.
    has_bias: whether a bias, float32, is added.
    """

    k: int
    columns: int
    threads: int
    prefetch: int
    has_bias: bool

    @property
    def cluster(self) -> int:
        return 1

    def grid(self, n: int) -> int:
        return -(-n // self.columns)


KERNEL = CuteKernel("router_gemm_cute_kernel", "Router", "PPPPi")


def parameters(n: int, k: int, has_bias: bool) -> Parameters:
    """Those that a call runs with."""
    return Parameters(k, 1 if n <= 256 else 2, 256, 4, has_bias)


def why_not(a: Tensor, b: Tensor, bias: Tensor | None) -> str | None:
    reason = cute_support.why_not(a)
    if reason:
        return reason
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return "takes bfloat16"
    n, k = (checks.known(x) for x in b.shape)
    if checks.known(m_of(a)) != 1:
        return "takes one token"
    if n is None or k is None or k % VECTOR or not n * k:
        return f"takes N and K that are known, K a multiple of {VECTOR}"
    if not b.is_contiguous() or a.stride(-1) != 1:
        return "takes contiguous operands"
    return KERNEL.why_not(a, parameters(n, k, bias is not None))


def run(a: Tensor, b: Tensor, bias: Tensor | None, *, prefetch: bool = False) -> Tensor:
    n, k = b.shape
    out = a.new_empty(*a.shape[:-1], n, dtype=torch.float32)
    added = None if bias is None else bias.float().contiguous()
    a, b = _aligned(a), _aligned(b)
    p = parameters(n, k, bias is not None)
    start = 0 if added is None else added.data_ptr()
    pointers = a.data_ptr(), b.data_ptr(), start, out.data_ptr()
    KERNEL.launch(a, p, p.grid(n), *pointers, n, pdl=prefetch)
    return out


def compile_units(site: Site, target: Target, max_tokens: int) -> tuple[CompileUnit, ...]:
    if target.capability < cute_support.MIN_CAPABILITY or site.m[0] > 1:
        return ()
    if not isinstance(site.n, int) or not isinstance(site.k, int) or site.k % VECTOR:
        return ()
    if (site.a_dtype, site.b_dtype) != ("bfloat16", "bfloat16"):
        return ()
    return (KERNEL.unit(parameters(site.n, site.k, site.bias), target),)


def _aligned(x: Tensor) -> Tensor:
    """``x`` where 16 bytes can be loaded at once: a slice may begin between such places."""
    return x.clone() if x.data_ptr() % 16 else x
