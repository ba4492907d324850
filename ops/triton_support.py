"""What all Triton kernels need: Triton, and a device it compiles for. Does not import Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from compile_ext.ops import device
from compile_ext.ops.checks import FP8

MIN_CAPABILITY = (8, 0)  # Ampere: older devices have no bfloat16 in hardware
FP8_CAPABILITY = (8, 9)  # conversions from and to e4m3 in hardware begin with Ada


def why_not(x: Tensor, *_: object) -> str | None:
    """Why no Triton kernel can run on the device of ``x``, a call's first argument, or None."""
    reason = device.why_not(x, MIN_CAPABILITY)
    if reason is None and not is_installed():
        return "Triton is not installed: pip install triton (a CUDA build of torch brings its own)"
    return reason


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_fp8(x: Tensor) -> bool:
    """Whether the device of ``x`` converts e4m3 in hardware; elsewhere the kernels take its bytes
    apart. So on CPU tensors: Triton's interpreter cuts values off where it should round."""
    return _capability(x) >= FP8_CAPABILITY


def has_bf16(x: Tensor) -> bool:
    """Whether products take bfloat16: Triton's interpreter multiplies the bytes."""
    return _capability(x) >= MIN_CAPABILITY


def tile(m: int, x: Tensor) -> dict[str, int]:
    """Tile and warps of a GEMM of m tokens, such that no register spills where K is a multiple of
    128 and rows are aligned (`cuobjdump -res-usage`, Triton 3.6 and 3.7): products of warp groups
    keep their operands in shared memory, others do not.
    """
    is_hopper = _capability(x)[0] == 9
    block_m = min(128 if is_hopper else 64, max(16, 1 << (m - 1).bit_length()))
    warps = 4 if block_m <= (64 if is_hopper else 32) else 8
    return {"BLOCK_M": block_m, "BLOCK_N": 128 if is_hopper else 64, "num_warps": warps}


def _capability(x: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)


def readable(x: Tensor) -> Tensor:
    """``x`` as a kernel gets it: where the device has no e4m3, Triton knows no such type either."""
    return x.view(torch.uint8) if x.dtype == FP8 and not has_fp8(x) else x


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def run_of(kernel: str, function: str = "run") -> Callable[..., Any]:
    """A function of ``compile_ext.ops.<kernel>``, which imports Triton: at the first call."""

    def run(*args: object) -> Any:
        return getattr(importlib.import_module(f"compile_ext.ops.{kernel}"), function)(*args)

    return run
