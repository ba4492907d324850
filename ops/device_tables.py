"""Which measured tables hold for a device, and the look-up on the path of every call.

Where two tables have a shape, the user's own counts: ``compile-ext tune`` has measured it on this
GPU with these versions. The shipped one is that of the GPU, or else of another GPU of its
architecture.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compile_ext.ops import cache_folder, deep_gemm_support, device, kernel_table
from compile_ext.ops.errors import TableError
from compile_ext.ops.installed import release_of
from compile_ext.ops.kernel_table import Row, Table

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "kernel_tables"
_PACKAGES = {
    "triton": "triton",
    "deep_gemm": deep_gemm_support.PACKAGE,
    "compile_ext": "compile-ext",
}


class Ranges(NamedTuple):
    """The rows of one op, N and K, in the order of M."""

    firsts: tuple[int, ...]
    lasts: tuple[int, ...]
    kernels: tuple[str, ...]

    def kernel(self, m: int) -> str | None:
        """The kernel of the row that has m, or None."""
        at = bisect.bisect_left(self.lasts, m)
        inside = at < len(self.lasts) and self.firsts[at] <= m
        return self.kernels[at] if inside else None


RangesByShape = dict[tuple[str, int | None, int | None], Ranges]


@dataclass(frozen=True)
class Machine:
    """What a measurement depends on.

    Args:
        arch: ``sm_90``.
        gpu: the device's name.
        versions: by name; "" for what is not installed.
    """

    arch: str
    gpu: str
    versions: dict[str, str]

    @property
    def file_name(self) -> str:
        """Of the user's table: another driver or another torch has a file of its own."""
        key = hashlib.sha256(json.dumps(self.versions, sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.arch}-{re.sub(r'[^A-Za-z0-9.]+', '_', self.gpu)}-{key}.json"


@dataclass(frozen=True)
class DeviceTables:
    """The tables that hold for a device.

    Args:
        machine: the device and the versions.
        user: what ``compile-ext tune`` has measured here, or None.
        shipped: what comes with the package for this architecture, or None.
        problems: why a file that is there is not used.
    """

    machine: Machine
    user: Table | None
    shipped: Table | None
    problems: tuple[str, ...]


def ranges_for(x: Tensor) -> RangesByShape | None:
    """The rows that hold for the GPU that ``x`` is on, or stands for; None on the CPU."""
    if x.is_cuda:
        return ranges_of(x.get_device())
    meant = device.target() if x.is_meta else None
    return None if meant is None else _ranges_of_target(meant)


@functools.cache
def ranges_of(index: int) -> RangesByShape:
    """The rows that hold for CUDA device ``index``, by op, N and K. Read once in a process."""
    found = tables_of(index)
    for problem in found.problems:
        log.warning("%s", problem)
    return _ranges(found.shipped, found.user)


@functools.cache
def _ranges_of_target(target: device.Target) -> RangesByShape:
    """Where the GPU is here its own, else those that are shipped for it."""
    for index in range(torch.cuda.device_count()):
        if device.Target.here(index) == target:
            return ranges_of(index)
    return _ranges(_shipped(target.arch, target.gpu, []))


def _ranges(*tables: Table | None) -> RangesByShape:
    """The last one counts where several have a shape."""
    ranges: RangesByShape = {}
    for table in tables:
        ranges.update(_by_shape(table.rows if table else ()))
    return ranges


def tables_of(index: int) -> DeviceTables:
    """Read the tables for CUDA device ``index``. A file that is no table is a problem, no error."""
    here = machine(index)
    problems: list[str] = []
    shipped = _shipped(here.arch, here.gpu, problems)
    path = user_file(here)
    user = _read(path, problems)
    if user is not None and not fits(user, here):
        problems.append(f"{path}: measured on {user.gpu} with {user.versions}, not here: not used")
        user = None
    return DeviceTables(here, user, shipped, tuple(problems))


def _shipped(arch: str, gpu: str, problems: list[str]) -> Table | None:
    """Of this GPU, or else of another one of its architecture."""
    tables = [x for x in (_read(p, problems) for p in sorted(SHIPPED.glob("*.json"))) if x]
    of_arch = [x for x in tables if x.arch == arch]
    of_gpu = [x for x in of_arch if x.gpu == gpu]
    return next(iter([*of_gpu, *of_arch]), None)


def user_file(here: Machine) -> Path:
    """Where ``compile-ext tune`` keeps what it has measured on this machine."""
    return cache_folder.cache_folder() / "kernel_tables" / here.file_name


def fits(table: Table, here: Machine) -> bool:
    """Whether a table was measured on this GPU with these versions."""
    return (table.arch, table.gpu, table.versions) == (here.arch, here.gpu, here.versions)


def machine(index: int) -> Machine:
    """CUDA device ``index``, and the versions of what its kernels come from."""
    major, minor = torch.cuda.get_device_capability(index)
    versions = {"driver": driver(), "torch": torch.__version__}
    versions |= {name: release_of(package) for name, package in _PACKAGES.items()}
    return Machine(f"sm_{major}{minor}", torch.cuda.get_device_name(index), versions)


def driver() -> str:
    """``580.159.04``; where the kernel module does not say, the CUDA that the driver supports."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    functions: Any = torch._C  # without CUDA it lacks this one
    return found[1] if found else f"CUDA {functions._cuda_getDriverVersion()}"


def _read(path: Path, problems: list[str]) -> Table | None:
    try:
        return kernel_table.read(path)
    except TableError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            problems.append(f"{error}: not used")
        return None


def _by_shape(rows: Iterable[Row]) -> RangesByShape:
    grouped: dict[tuple[str, int, int], list[Row]] = {}
    for row in sorted(rows):
        grouped.setdefault((row.op, row.n, row.k), []).append(row)
    return {
        shape: Ranges(
            tuple(x.m[0] for x in group),
            tuple(x.m[1] for x in group),
            tuple(x.kernel for x in group),
        )
        for shape, group in grouped.items()
    }
