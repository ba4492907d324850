"""What compiled kernels come from, by name; "" for what is not installed."""

from __future__ import annotations

import torch

import compile_ext
from compile_ext.ops import cute_support, deep_gemm_support, device_tables
from compile_ext.ops.installed import release_of


def versions() -> dict[str, str]:
    """The driver only where a GPU is."""
    return {
        "compile_ext": compile_ext.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": release_of("triton"),
        "deep_gemm": release_of(deep_gemm_support.PACKAGE),
        "cutlass_dsl": release_of(cute_support.PACKAGE),
        "driver": device_tables.driver() if torch.cuda.is_available() else "",
    }
