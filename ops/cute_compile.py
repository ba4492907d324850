"""Compile a CuTe DSL kernel to a cubin, without a GPU (checked with CuTe DSL 4.8.1, which it
imports when asked)."""

from __future__ import annotations

import importlib
import re
import tempfile
import threading
from pathlib import Path
from typing import Any

from compile_ext.ops.errors import KernelUnavailable

_ONE_AT_A_TIME = threading.Lock()  # the tracer keeps its state in globals


def compile_cubin(source: str, builder: str, parameters: tuple[Any, ...], arch: str) -> bytes:
    """Compile ``builder(parameters)`` of ``compile_ext.ops.<source>``.

    Args:
        builder: a class: ``__call__`` is a ``cute.jit`` function that launches the one kernel with
            what ``arguments()`` gives and a stream. The kernel takes raw pointers and numbers.
        arch: ``sm_90a``.

    Raises:
        KernelUnavailable: CuTe DSL does not load, or does not compile it.
    """
    try:
        with _ONE_AT_A_TIME, tempfile.TemporaryDirectory() as folder:
            return _compile(source, builder, parameters, arch, Path(folder))
    # A compiler fails in any way that it likes. There is nothing else in there: no launch, no GPU.
    except Exception as error:
        raise KernelUnavailable(f"CuTe DSL does not compile it ({_first_line(error)})") from error


def _compile(
    source: str, builder: str, parameters: tuple[Any, ...], arch: str, folder: Path
) -> bytes:
    cute = importlib.import_module("cutlass.cute")
    runtime = importlib.import_module("cutlass.cute.runtime")
    kernel = getattr(importlib.import_module(f"compile_ext.ops.{source}"), builder)(parameters)
    options = f"--gpu-arch {arch} --keep-cubin --dump-dir {folder}"
    cute.compile(kernel, *kernel.arguments(), runtime.make_fake_stream(), options=options)
    cubins = list(folder.glob("*.cubin"))
    if len(cubins) != 1:
        raise RuntimeError(f"it leaves {len(cubins)} cubins, wanted 1")
    return cubins[0].read_bytes()


def _first_line(error: Exception) -> str:
    """What an error says first: CuTe DSL's are coloured, of many lines, and begin with an empty
    one."""
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))
    lines = [x.strip() for x in text.splitlines() if x.strip()]
    return lines[0] if lines else type(error).__name__
