"""What this machine has of what the kernels need, and what to install where something lacks."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from compile_ext.ops import cute_support, deep_gemm_support, device_tables, triton_support
from compile_ext.ops.define import definitions
from compile_ext.ops.device_tables import DeviceTables
from compile_ext.ops.installed import release_of
from compile_ext.ops.kernel_table import Table


@dataclass(frozen=True)
class Finding:
    """One thing that kernels need.

    Args:
        name: what it is.
        found: its version or model; "" where it is missing.
        use: what it is for.
        reason: why it cannot be used, and what to do; None where it can.
    """

    name: str
    found: str
    use: str
    reason: str | None = None


def examine() -> list[Finding]:
    """All findings, in the order in which one depends on the other."""
    return [
        Finding("Python", platform.python_version(), "everything"),
        Finding("torch", torch.__version__, "everything"),
        *_devices(),
        _triton(),
        _toolkit(),
        _deep_gemm(),
        _cute_dsl(),
        *_kernel_tables(),
        *_failures(),
    ]


def _devices() -> Iterator[Finding]:
    use = "kernels other than the reference"
    if torch.version.cuda is None:
        yield Finding("CUDA device", "", use, "this torch is a CPU build: install a CUDA build")
        return
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        found = f"{torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"
        wanted = ".".join(map(str, triton_support.MIN_CAPABILITY))
        too_old = (major, minor) < triton_support.MIN_CAPABILITY
        reason = f"no kernel runs below compute capability {wanted}" if too_old else None
        yield Finding(f"CUDA device {i}", found, use, reason)
    if not torch.cuda.device_count():
        yield Finding("CUDA device", "", use, "no device: look at what nvidia-smi says")


def _triton() -> Finding:
    use = "any shape, bias and dtype; few tokens"
    if triton_support.is_installed():
        return Finding("Triton", release_of("triton"), use)
    return Finding("Triton", "", use, "pip install triton: a CUDA build of torch brings its own")


def _toolkit() -> Finding:
    use = "DeepGEMM compiles with it"
    found = deep_gemm_support.nvcc()
    return Finding("nvcc", str(found or ""), use, deep_gemm_support.why_no_nvcc(found))


def _deep_gemm() -> Finding:
    use = "block-scaled FP8 on Hopper"
    return Finding(
        "DeepGEMM", release_of(deep_gemm_support.PACKAGE), use, deep_gemm_support.why_not()
    )


def _cute_dsl() -> Finding:
    """Not of the kernels on disk, which run without it: which ones a model needs is not known."""
    reason = cute_support.why_no_compiler()
    return Finding(
        "CuTe DSL",
        release_of(cute_support.PACKAGE),
        "routers of few tokens on Hopper",
        reason and f"{reason}, where the kernels are not on disk",
    )


def _kernel_tables() -> Iterator[Finding]:
    for i in range(torch.cuda.device_count()):
        tables = device_tables.tables_of(i)
        found = [f"{name} of {x.date}" for name, x in _named(tables) if x is not None]
        use = "which kernel is tried first"
        yield Finding(f"kernel table {i}", ", ".join(found), use, _why_not_measured(tables))


def _named(tables: DeviceTables) -> tuple[tuple[str, Table | None], ...]:
    return ("measured here", tables.user), ("shipped", tables.shipped)


def _why_not_measured(tables: DeviceTables) -> str | None:
    """Why the tables may not fit this machine, and what to do about it, or None."""
    here, shipped = tables.machine, tables.shipped
    if tables.problems:
        return "; ".join(tables.problems)
    if tables.user is not None or (shipped is not None and device_tables.fits(shipped, here)):
        return None
    if shipped is None:
        return f"none for {here.gpu}, so each op's own order holds: compile-ext tune measures"
    other = [
        f"{k} {v or '-'}, here {here.versions.get(k) or '-'}" for k, v in _others(shipped, here)
    ]
    if shipped.gpu != here.gpu:
        other.insert(0, f"{shipped.gpu}, here {here.gpu}")
    return f"measured with {'; '.join(other)}: compile-ext tune measures anew"


def _others(table: Table, here: device_tables.Machine) -> Iterator[tuple[str, str]]:
    return ((k, v) for k, v in table.versions.items() if here.versions.get(k) != v)


def _failures() -> Iterator[Finding]:
    """The kernels that gave up in this process, in the middle of a call."""
    for definition in definitions():
        for kernel in definition.kernels:
            for device, reason in kernel.failures.items():
                name = f"{kernel.name} on {device}"
                yield Finding(name, "", definition.name, f"gave up in this process: {reason}")
