"""The router GEMMs of vLLM 0.33 and FlashInfer 0.7, where these packages can be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

import torch
from torch import Tensor

Router = Callable[[Tensor, Tensor], Tensor]
_VLLM = "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16"
_FLASHINFER = "flashinfer.gemm"
_FLASHINFER_SHAPES = {(256, 7168): "mm_M1_16_K7168_N256", (256, 6144): "mm_M1_16_K6144_N256"}


def peers(m: int, n: int, k: int) -> Iterator[tuple[str, Router]]:
    """Those that run this shape here: vLLM's on Hopper and newer, FlashInfer's on Blackwell, both
    up to 16 tokens."""
    capability = torch.cuda.get_device_capability()
    if m > 16:
        return
    vllm = _function(_VLLM, "ll_bf16_gemm") if capability >= (9, 0) else None
    if vllm is not None:
        yield "vllm", vllm
    name = _FLASHINFER_SHAPES.get((n, k))
    flashinfer = _function(_FLASHINFER, name) if name and capability >= (10, 0) else None
    if flashinfer is not None:

        def router(y: Tensor, b: Tensor) -> Tensor:
            out = y.new_empty(m, n, dtype=torch.float32)
            flashinfer(y, b.t(), out, launch_with_pdl=True)
            return out

        yield "flashinfer", router


def _function(module: str, name: str) -> Callable[..., Tensor] | None:
    try:
        found: Callable[..., Tensor] = getattr(import_module(module), name)
    except ImportError:
        return None
    return found
