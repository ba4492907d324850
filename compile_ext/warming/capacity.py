"""How many worker processes this machine takes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile_ext.ops.call_site import Call, TensorForm, value_of
from compile_ext.ops.compile_unit import CompileUnit

# Host memory of a worker, in bytes. One of Triton's takes 0.4 GB (CPU build of torch 2.13); a CUDA
# build and nvcc take more.
WORKER_BYTES = 1.5e9
# A CUDA context, cuBLAS's workspace and the loaded kernels, in bytes of the GPU.
CONTEXT_BYTES = 0.6e9
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Capacity:
    """The number of processes, and what it is bound by, for people.

    Args:
        jobs: worker processes.
        device_jobs: of those, how many may use the GPU.
        bound_by: ``16 cores``.
    """

    jobs: int
    device_jobs: int
    bound_by: str


def capacity(units: Sequence[CompileUnit], jobs: int | None) -> Capacity:
    """For these units, which are not on disk. ``jobs``: what the caller wants, or None."""
    cores, free = usable_cores(), free_host_bytes()
    bounds = [(len(units), f"{len(units)} units")]
    if jobs is not None:
        bounds.append((jobs, f"jobs={jobs}"))
    else:
        bounds.append((cores, f"{cores} cores"))
        by_memory = int(free / WORKER_BYTES)
        bounds.append((by_memory, f"{free / 1e9:.1f} GB of free host memory"))
    number, bound_by = min(bounds, key=lambda bound: bound[0])
    number = max(1, number)
    with_device = [unit for unit in units if unit.compiler.needs_device]
    if not with_device or not torch.cuda.is_available():
        return Capacity(number, number, bound_by)
    free_device, _ = torch.cuda.mem_get_info()
    wanted = CONTEXT_BYTES + max(map(_bytes_of, with_device))
    device_jobs = max(1, min(number, int(free_device / wanted)))
    if device_jobs < number:
        bound_by += f"; {device_jobs} on the GPU: {free_device / 1e9:.1f} GB of it are free"
    return Capacity(number, device_jobs, bound_by)


def usable_cores() -> int:
    """Of this process: its affinity, and the quota of its cgroup."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read("cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def free_host_bytes() -> float:
    """What the kernel says is available, within the limit of the cgroup."""
    free = math.inf
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read("memory.max"), _read("memory.current")
    if limit.isdecimal() and used.isdecimal():
        # Pages of files count as used, and are given up where memory is short.
        stat = dict(line.split() for line in _read("memory.stat").splitlines())
        free = min(free, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return max(0.0, free)


def _read(name: str) -> str:
    """A file of the cgroup (version 2) that this process is in; "" where there is none."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        places = (_CGROUP / own.lstrip("/") / name, _CGROUP / name)
        return next(x.read_text().strip() for x in places if x.is_file())
    except (OSError, StopIteration):
        return ""


def _bytes_of(unit: CompileUnit) -> int:
    """Of the tensors of its largest call, and of a result of as many bytes."""
    return 2 * max((sum(_sizes(call)) for call in unit.calls), default=0)


def _sizes(call: Call) -> Iterator[int]:
    for _, value in call.site.arguments:
        for form in value if isinstance(value, tuple) else (value,):
            if isinstance(form, TensorForm):
                elements = math.prod(value_of(size, call.m) for size in form.shape)
                dtype: Any = getattr(torch, form.dtype)
                yield elements * dtype.itemsize
