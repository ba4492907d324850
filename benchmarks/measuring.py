"""What the benchmarks share beside ``compile_ext.tune``: kernel names, and results as JSON with
what they were measured on."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile

import compile_ext
from compile_ext.tune.timing import Call, synchronize

JsonPath = Annotated[Path | None, typer.Option("--json", help="write the results here")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def write(json_path: Path | None, **rows: Any) -> None:
    """Write the results, and what they were measured on, if there is a path."""
    if json_path:
        json_path.write_text(json.dumps({**about(), **rows}, indent=1) + "\n")


def about() -> dict[str, str | None]:
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "cuda": torch.version.cuda,
        "command": shlex.join(["python", *sys.argv]),
        "compile_ext": compile_ext.__version__,
    }


def _cpu() -> str:
    """Not ``platform.processor()``, which is empty on most Linux systems."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), "unknown")


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
