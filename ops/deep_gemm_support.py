"""Whether DeepGEMM can run here, and what to install where it cannot. Imports it when asked.

Which release loads with which torch was read off the symbols of its wheels, and run for torch 2.11
(H200, CUDA 13.0). All of them import as ``deep_gemm`` and compile kernels with nvcc when they are
first called.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch

PACKAGE = "sgl-deep-gemm"
# torch release -> the release of PACKAGE that was built for it
RELEASES = {"2.11": "0.1.5.post1", "2.13": "0.1.7", "2.14": "0.2.5"}
_CACHE_VARIABLE = "DG_JIT_CACHE_DIR"
_KERNEL_BYTES = 16 * 2**20  # one compilation: source, temporary files and cubin


@functools.cache
def why_not() -> str | None:
    """Why DeepGEMM cannot run in this process, and what to do about it, or None.

    Asked once: what is installed or mounted later needs a new process.
    """
    if importlib.util.find_spec("deep_gemm") is None:
        return f"DeepGEMM is not installed: {install()}"
    if nvcc() is None:
        return "DeepGEMM compiles with nvcc, which was not found: install CUDA's, or set CUDA_HOME"
    reason = why_no_cache(cache_folder())
    if reason:
        return f"DeepGEMM {reason}: set {_CACHE_VARIABLE} to another folder"
    try:
        importlib.import_module("deep_gemm")
    # Symbols of another torch (OSError, ImportError), a toolkit that it does not find (an assert).
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        return f"DeepGEMM does not load with torch {torch.__version__} ({first[0]}): {install()}"
    return None


def install() -> str:
    """The command that installs the release for this torch."""
    release = RELEASES.get(".".join(torch.__version__.split(".")[:2]))
    if release is None:
        known = ", ".join(RELEASES)
        return f"no release is known for torch {torch.__version__}; there are some for {known}"
    return f"pip install {PACKAGE}=={release}"


def nvcc() -> Path | None:
    """The compiler, where DeepGEMM looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and (found := shutil.which("nvcc")):
        return Path(found)
    place = Path(home or "/usr/local/cuda") / "bin" / "nvcc"  # a home that is set is the only one
    return place if os.access(place, os.X_OK) else None


def cache_folder() -> Path:
    """Where DeepGEMM keeps what it has compiled; of a list, the first takes the new ones."""
    given = os.environ.get(_CACHE_VARIABLE, "").split(":")[0]
    return Path(given) if given else Path.home() / ".deep_gemm"


def why_no_cache(folder: Path) -> str | None:
    """Why a folder, which need not exist yet, takes no compiled kernel, or None."""
    place = next((x for x in (folder, *folder.parents) if x.exists()), folder)
    try:
        if shutil.disk_usage(place).free < _KERNEL_BYTES:
            return f"finds the disk of its cache full ({place})"
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"cannot write its cache ({place}: {error.strerror or error})"
