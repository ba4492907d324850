"""A script between DeepGEMM and nvcc, so that a seal can see a compile and refuse it: the library
runs its compiler from C++, where Python has no hook.

Read in DeepGEMM 0.1.5: ``DG_JIT_NVCC_COMPILER`` names the compiler. It is read once, when the first
kernel is built, and the path is no part of the cache's key.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Protocol

SCRIPT = Path(__file__).with_name("deep_gemm_nvcc.sh")
COMPILER = "DG_JIT_NVCC_COMPILER"
REAL = "COMPILE_EXT_NVCC"
SEAL = "COMPILE_EXT_NVCC_SEAL"  # <process>:<folder>, while the process is sealed
_NVRTC = "DG_JIT_USE_NVRTC"


class Watcher(Protocol):
    """Who wants to know of compiles."""

    noted: memoryview  # a byte, not 0 once the script has noted a compile

    def look(self, *, failed: bool) -> None:
        """Tell of what was noted. ``failed``: a call has, as one does whose compile was refused:
        raises then what refused it, or returns if nothing did."""


watcher: Watcher | None = None
_was_first: bool | None = None  # the variable was set before the library was imported


def stand_between(nvcc: Path) -> None:
    """Have DeepGEMM compile through the script, which calls ``nvcc``, or what the user has named in
    its place. Nothing happens where the script cannot run."""
    global _was_first
    if not os.access(SCRIPT, os.X_OK):  # a disk that is mounted noexec, or a copy without the bit
        return
    given = os.environ.get(COMPILER, "")
    if _was_first is None:
        _was_first = given == str(SCRIPT) or "deep_gemm" not in sys.modules
    if Path(given).name == SCRIPT.name:  # inherited: ours, or that of another installation
        given = os.environ.get(REAL, "")
        # Not inherited, of another file system, or a script, which would call itself.
        if shutil.which(given) is None or Path(given).name == SCRIPT.name:
            given = ""
    os.environ[REAL] = given or str(nvcc)
    os.environ[COMPILER] = str(SCRIPT)


def stands_between() -> bool:
    """Whether DeepGEMM in this process compiles through the script for certain: not where it was
    imported first, and may have read the variable, nor where it compiles in its own process."""
    return (
        bool(_was_first)
        and os.environ.get(COMPILER) == str(SCRIPT)
        and os.environ.get(_NVRTC, "0") in ("", "0")
    )
