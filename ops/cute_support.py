"""Whether CuTe DSL can run here, and what its kernels need. Does not import it.

A kernel on disk needs no CuTe DSL: it was compiled here before, or on another host.
"""

from __future__ import annotations

import functools
import re

from torch import Tensor

from compile_ext.ops import device
from compile_ext.ops.installed import release_of

MIN_CAPABILITY = (9, 0)  # Hopper: PDL and clusters
PACKAGE = "nvidia-cutlass-dsl"
# Seen: 4.5 has no st.async, and 4.6 and 4.7 fail in ``router_mma_cute_kernel``.
MIN_RELEASE = (4, 8)
INSTALL = "pip install 'compile-ext[cuda]'"


def why_not(x: Tensor, *_: object) -> str | None:
    """Why no CuTe DSL kernel can run on the device of ``x``, a call's first argument, or None."""
    return device.why_not(x, MIN_CAPABILITY)


@functools.cache
def why_no_compiler() -> str | None:
    """Why nothing can be compiled here, and what to do about it, or None. Asked once: what is
    installed later needs a new process."""
    found = release_of(PACKAGE)
    if not found:
        return f"CuTe DSL is not installed: {INSTALL}"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < MIN_RELEASE:
        return f"CuTe DSL {found} is older than {'.'.join(map(str, MIN_RELEASE))}: {INSTALL}"
    return None


@functools.cache
def compiler() -> str | None:
    """CuTe DSL's release and the CUDA that it compiles with, or None where there is none."""
    if why_no_compiler() is not None:
        return None
    return f"{release_of(PACKAGE)}+cu{13 if release_of(f'{PACKAGE}-libs-cu13') else 12}"


def arch(capability: device.Capability) -> str:
    """What to compile for: with the features of this one architecture, so for no newer one."""
    return f"sm_{capability[0]}{capability[1]}a"
