"""What the benchmarks share: timing in turn, kernel names, and what a result was measured on."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import compile_ext

Call = Callable[[], Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def about(command: str) -> dict[str, str | None]:
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor(),
        "cuda": torch.version.cuda,
        "command": command,
        "compile_ext": compile_ext.__version__,
    }


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def kernel_names(call: Call) -> list[str]:
    """The kernels of one call on the device, in order."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        synchronize()
    events = profiled.events() or []
    return [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]


def allocations(call: Call) -> int:
    """Blocks that one call asks the device's allocator for."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def captured(call: Call, times: int = 1) -> Call:
    """``times`` calls as one replay of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


def in_turn(calls: Mapping[str, Call], rounds: int, repeat: int = 1) -> dict[str, list[float]]:
    """Microseconds a call, wall time until the device is done, the calls of a round in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize()
            start = time.perf_counter_ns()
            for _ in range(repeat):
                call()
            synchronize()
            times[name].append((time.perf_counter_ns() - start) / 1e3 / repeat)
    return times


def summary(times: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {"us": middle, "quartile_low_us": low, "quartile_high_us": high}
