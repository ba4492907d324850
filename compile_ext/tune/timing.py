"""Time calls in turn, as wall time or between CUDA events, and sum the times up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

Call = Callable[[], Any]


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


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
    return float(start.elapsed_time(end)) * 1e3


def summary(times: list[float], unit: str = "us") -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {unit: middle, f"quartile_low_{unit}": low, f"quartile_high_{unit}": high}
