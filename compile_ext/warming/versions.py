"""What compiled kernels come from, by name; "" for what is not installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

import compile_ext
from compile_ext.ops import cute_support, deep_gemm_support, device_tables


def versions() -> dict[str, str]:
    """The driver only where a GPU is."""
    return {
        "compile_ext": compile_ext.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "triton": _version("triton"),
        "deep_gemm": _version(deep_gemm_support.PACKAGE),
        "cutlass_dsl": _version(cute_support.PACKAGE),
        "driver": device_tables.driver() if torch.cuda.is_available() else "",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
