"""What the benchmarks share: timing in turn, kernel names, and results as JSON with what they were
measured on."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile

import compile_ext

Call = Callable[[], Any]
JsonPath = Annotated[Path | None, typer.Option("--json", help="write the results here")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def write(json_path: Path | None, command: str, **rows: Any) -> None:
    """Write the results, and what they were measured on, if there is a path."""
    if json_path:
        json_path.write_text(json.dumps({**about(command), **rows}, indent=1) + "\n")


def about(command: str) -> dict[str, str | None]:
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "cuda": torch.version.cuda,
        "command": command,
        "compile_ext": compile_ext.__version__,
    }


def _cpu() -> str:
    """Not ``platform.processor()``, which is empty on most Linux systems."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), "unknown")


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def kernel_names(call: Call) -> list[str]:
    """The kernels and copies of one call on the device, in order; it is called once before.

    ``compile_ext.demo.kernels.count_kernels`` leaves copies out: here they are what a pad costs.
    """
    call()
    synchronize()
    # acc_events: else some versions of torch warn that events of earlier cycles are dropped.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
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


def in_turn(
    calls: Mapping[str, Call],
    rounds: int,
    repeat: int = 1,
    *,
    events: bool = False,
    before: Call = lambda: None,
) -> dict[str, list[float]]:
    """Microseconds a call, the calls of a round in turn: wall time until the device is done; with
    ``events`` the time between two CUDA events, without the host's share. ``before`` runs before
    each, untimed."""
    clock = _device_us if events else _wall_us
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clock(call, repeat, before) / repeat)
    return times


def _wall_us(call: Call, repeat: int, before: Call) -> float:
    before()
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(repeat):
        call()
    synchronize()
    return (time.perf_counter_ns() - start) / 1e3


def _device_us(call: Call, repeat: int, before: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before()  # while the device is busy with it, the host enqueues the rest
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def summary(times: list[float], unit: str = "us") -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {unit: middle, f"quartile_low_{unit}": low, f"quartile_high_{unit}": high}
