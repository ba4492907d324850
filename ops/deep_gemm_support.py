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
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from compile_ext.ops import deep_gemm_nvcc, launches
from compile_ext.ops.errors import KernelUnavailable

PACKAGE = "sgl-deep-gemm"
# torch release -> the release of PACKAGE that was built for it
RELEASES = {"2.11": "0.1.5.post1", "2.13": "0.1.7", "2.14": "0.2.5"}
_CACHE_VARIABLE = "DG_JIT_CACHE_DIR"
_LOAD_ERRORS = r"INVALID_IMAGE|NO_BINARY|INVALID_PTX|UNSUPPORTED_PTX|INVALID_SOURCE|NOT_FOUND"
_NVCC = (12, 3)  # DeepGEMM asserts it; from 12.9 its kernels are fastest
_KERNEL_BYTES = 16 * 2**20  # one compilation: source, temporary files and cubin


@functools.cache
def why_not() -> str | None:
    """Why DeepGEMM cannot run in this process, and what to do about it, or None.

    Asked once: what is installed or mounted later needs a new process.
    """
    if importlib.util.find_spec("deep_gemm") is None:
        return f"DeepGEMM is not installed: {install()}"
    compiler = nvcc()
    reason = why_no_nvcc(compiler)
    if reason or compiler is None:
        return f"DeepGEMM compiles with nvcc, which {reason}"
    reason = why_no_cache(cache_folder())
    if reason:
        return f"DeepGEMM {reason}: set {_CACHE_VARIABLE} to another folder"
    deep_gemm_nvcc.stand_between(compiler)
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


def why_no_nvcc(place: Path | None) -> str | None:
    """What is wrong with the compiler, and what to do about it, or None."""
    fix = "install NVIDIA's CUDA toolkit, or set CUDA_HOME to it"
    if place is None:
        return f"was not found: {fix}"
    try:
        done = subprocess.run([place, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"does not run ({place}: {error}): {fix}"
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if done.returncode or release is None:
        said = (done.stderr or done.stdout).strip().splitlines()[:1] or ["no release"]
        return f"does not run ({place}: {said[0]}): {fix}"
    found = int(release[1]), int(release[2])
    if found < _NVCC:
        wanted = ".".join(map(str, _NVCC))
        return f"is too old ({place}: {release[1]}.{release[2]}, wanted {wanted}): {fix}"
    return None


def call(function: str, *args: object) -> None:
    """Call a function of DeepGEMM, which compiles a kernel where it has none for these arguments.

    Raises:
        KernelUnavailable: this release has no such function, or its compiler or cache fails. Other
            errors (out of memory, an illegal address) are the library's own.
        SealError: it would have to compile, under a seal.
    """
    noted = launches.recorder()
    if noted is not None:
        from compile_ext.ops.deep_gemm_compiler import launches_of

        noted += launches_of(function, args)
        return
    deep_gemm = importlib.import_module("deep_gemm")
    if not hasattr(deep_gemm, function):
        raise KernelUnavailable(f"this release of DeepGEMM has no {function}: {install()}")
    try:
        getattr(deep_gemm, function)(*args)
    except RuntimeError as error:
        detail = _compile_failure(str(error))
        if detail is None:
            raise
        if deep_gemm_nvcc.watcher is not None:
            deep_gemm_nvcc.watcher.look(failed=True)
        hint = "what nvcc says is in the output of this process; compile-ext doctor looks at it"
        raise KernelUnavailable(f"DeepGEMM does not compile it ({detail}): {hint}") from error
    watcher = deep_gemm_nvcc.watcher
    if watcher is not None and watcher.noted[0]:
        watcher.look(failed=False)


def _compile_failure(text: str) -> str | None:
    """What a failure of DeepGEMM's compiler, cache or loader says, without the place in its source;
    None for another error. An error is ``<kind> error (<file>:<line>): <what>``."""
    first = (text.strip().splitlines() or [""])[0]
    if "filesystem error" in first:
        return first
    found = re.search(r"(\w[\w ]*) error \((.*?):\d+\): (.*)", first)
    if found is None:
        return None
    kind, file, what = found.groups()
    # Files of the compiler lie in csrc/jit (0.1) and deep_jit (0.2); what is included there has the
    # folder in its name.
    if "/jit/" not in file and "deep_jit" not in file:
        return None
    if kind.startswith("CUDA"):  # a device in trouble says so anywhere: only what a loader says
        return what if re.search(_LOAD_ERRORS, what) else None
    return what


def cache_folder() -> Path:
    """Where DeepGEMM keeps what it has compiled; of a list, the first takes the new ones."""
    given = os.environ.get(_CACHE_VARIABLE, "").split(":")[0]
    return Path(given) if given else Path.home() / ".deep_gemm"


def entries_folder() -> Path:
    """Where each compiled kernel has a folder, in ``cache_folder()``."""
    return cache_folder() / "cache"


def use_cache(folder: Path) -> None:
    """From now on DeepGEMM keeps what it compiles in ``folder``: it reads the name at its first
    call, so before that."""
    os.environ[_CACHE_VARIABLE] = str(folder)


@functools.cache
def nvcc_release(place: Path) -> str:
    """All that the compiler says of its release."""
    return subprocess.run([place, "--version"], capture_output=True, text=True, check=True).stdout


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
