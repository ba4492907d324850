"""``rms_norm_router`` in CuTe DSL: norm and router in one launch of ``router_dot_cute_kernel``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compile_ext.ops import checks, cute_support, router_cute_parameters, tma_rows
from compile_ext.ops.router_cute_parameters import VECTOR, DotParameters
from compile_ext.ops.router_gemm_cute import DOT, address, name_of


def why_not(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
) -> str | None:
    reason = cute_support.why_not(x)
    if reason:
        return reason
    rows = {"x": x, "residual": residual, "weight": weight, "b": b}
    present = {name: t for name, t in rows.items() if t is not None}
    if any(t.dtype != torch.bfloat16 for t in present.values()):
        return "takes bfloat16"
    n, k = map(checks.known, b.shape)
    if n is None or k is None:
        return "chooses its configuration by N and K, of which one is symbolic"
    p = _parameters(n, k, bias, weight is not None, residual is not None, round_before_weight)
    if isinstance(p, str):
        return p
    if any(t.stride(-1) != 1 for t in present.values()) or (
        bias is not None and bias.stride(0) != 1
    ):
        return "takes contiguous rows"
    return tma_rows.why_not(**present) or DOT.why_not(x, p)


def run(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    b: Tensor,
    bias: Tensor | None,
    *,
    prefetch: bool = False,
    split: router_cute_parameters.Split | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    n, k = b.shape
    y, logits = x.new_empty(1, k), x.new_empty(1, n, dtype=torch.float32)
    total = x.new_empty(0 if residual is None else (1, k))
    p = _parameters(n, k, bias, weight is not None, residual is not None, round_before_weight)
    assert not isinstance(p, str)  # why_not saw to it
    if split is not None:
        p = p._replace(split=split)
    read = x.data_ptr(), address(residual), address(weight), b.data_ptr(), address(bias)
    written = y.data_ptr(), total.data_ptr(), logits.data_ptr()
    DOT.launch(x, p, p.grid(n), *read, *written, b.stride(0), eps, n, pdl=prefetch)
    return y, total, logits


def _parameters(
    n: int, k: int, bias: Tensor | None, has_weight: bool, adds: bool, rounds: bool
) -> DotParameters | str:
    split = _split(n, k)
    if isinstance(split, str):
        return split
    return DotParameters(k, split, name_of(bias), True, has_weight, adds, rounds and has_weight)


@functools.lru_cache(maxsize=4096)
def _split(n: int, k: int) -> router_cute_parameters.Split | str:
    if not n:
        return "a dimension is 0"
    if k % VECTOR:
        return f"takes K in multiples of {VECTOR}, K is {k}"
    found = router_cute_parameters.split(n, k, has_norm=True)
    return found or f"a row of K = {k} does not fit into the registers of a cluster"
