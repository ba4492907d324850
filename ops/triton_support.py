"""What all Triton kernels need: Triton, and a device it compiles for. Does not import Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from compile_ext.ops import device
from compile_ext.ops.checks import FP8
from compile_ext.ops.errors import KernelUnavailable, SealError
from compile_ext.ops.ue8m0 import E8M0

CACHE_VARIABLE = "TRITON_CACHE_DIR"
MIN_CAPABILITY = (8, 0)  # Ampere: older devices have no bfloat16 in hardware
PDL_CAPABILITY = (9, 0)  # Hopper
FP8_CAPABILITY = (8, 9)  # conversions from and to e4m3 in hardware begin with Ada
# What a RuntimeError of Triton's says where it could not compile, keep or load a kernel.
_COMPILE_ERRORS = (
    "PassManager::run failed",
    "Failed to find C compiler",
    "Failed to load newly compiled",
    "Could not create or locate cache dir",
    "Cannot find ptxas",
    "device kernel image is invalid",
    "unsupported toolchain",
)


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


def why_no_fp8(x: Tensor) -> str | None:
    """Why the device of ``x`` has no conversions of e4m3 in hardware, or None."""
    return device.why_not(x, FP8_CAPABILITY)


def has_pdl(x: Tensor) -> bool:
    """Whether the device of ``x`` has programmatic dependent launch."""
    return _capability(x) >= PDL_CAPABILITY


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
    return device.capability(x) or (0, 0)


def readable(x: Tensor) -> Tensor:
    """``x`` as a kernel gets it: Triton does not know e8m0, nor e4m3 where the device has none."""
    as_bytes = x.dtype == E8M0 or (x.dtype == FP8 and not has_fp8(x))
    return x.view(torch.uint8) if as_bytes else x


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def keep_cache_folder() -> None:
    """Let Triton go on with the folder that it keeps kernels in now. Inductor names another one for
    each device, in the variable that Triton reads, when it first makes a kernel: from then on what
    a warmup has compiled would not be found, nor what another rank has."""
    if is_installed() and os.environ.get(CACHE_VARIABLE) is None:
        from triton import knobs

        os.environ[CACHE_VARIABLE] = str(knobs.cache.dir)


def run_of(kernel: str, function: str = "run") -> Callable[..., Any]:
    """A function of ``compile_ext.ops.<kernel>``, which imports Triton: at the first call. Raises
    KernelUnavailable where Triton does not load, compile or keep a kernel."""

    def run(*args: object, **options: object) -> Any:
        try:
            module = importlib.import_module(f"compile_ext.ops.{kernel}")
            return getattr(module, function)(*args, **options)
        except SealError:
            raise
        except Exception as error:
            reason = _why_not_compiled(error)
            if reason is None:
                raise  # out of memory, an illegal address, a fault of ours
            raise KernelUnavailable(reason) from error

    return run


def _why_not_compiled(error: Exception) -> str | None:
    """The reason, if Triton could not make a kernel of its source; None for other errors."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, ImportError):
        return f"Triton does not load ({lines[0]})"
    # Nothing but Triton's compiler opens a file or starts a process in a launch.
    if isinstance(error, (OSError, subprocess.SubprocessError)):
        hint = f"{CACHE_VARIABLE} names the folder where it keeps kernels"
        return f"Triton does not compile it ({lines[0]}); {hint}"
    if isinstance(error, RuntimeError):
        said = any(text in str(error) for text in _COMPILE_ERRORS)
        return f"Triton does not compile it ({lines[0]})" if said else None
    if not type(error).__module__.startswith("triton."):
        return None
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, CompilationError):
        return f"Triton does not compile it ({lines[-1].strip()})"  # the source comes first
    if isinstance(error, (OutOfResources, PTXASError)):
        return f"Triton does not compile it ({lines[0]})"
    return None
