"""Whether CuTe DSL can run here, and what its kernels need. Does not import it.

A kernel on disk needs no CuTe DSL: it was compiled here before, or on another host.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

from torch import Tensor

from compile_ext.ops import device

MIN_CAPABILITY = (9, 0)  # Hopper: PDL and clusters
PACKAGE = "nvidia-cutlass-dsl"
INSTALL = "pip install 'compile-ext[cuda]'"


def why_not(x: Tensor, *_: object) -> str | None:
    """Why no CuTe DSL kernel can run on the device of ``x``, a call's first argument, or None."""
    return device.why_not(x, MIN_CAPABILITY)


def compiler() -> str | None:
    """CuTe DSL's release and the CUDA that it compiles with, or None where it is not installed."""
    found = release(PACKAGE)
    return found and f"{found}+cu{13 if release(f'{PACKAGE}-libs-cu13') else 12}"


def arch(capability: device.Capability) -> str:
    """What to compile for: with the features of this one architecture, so for no newer one."""
    return f"sm_{capability[0]}{capability[1]}a"


@functools.cache
def release(package: str) -> str | None:
    """Of a package, or None where it is not installed. Asked once: what is installed later needs a
    new process."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
