"""What a seal adds to one call, on the host, where nothing is compiled.

    python benchmarks/bench_seal.py [--json benchmarks/results/seal.json]

The same call in turns without a seal and under one; what a turn under the seal adds is its
difference from the mean of the turns before and after it, so that what drifts cancels. A process
keeps a bias of its own for each row, of -1.9 to 0.6 us, however many turns it takes: so there are
many processes, and a row has the medians of the processes' medians and the interval between their
3rd and 10th, which holds the median over processes in 96 of 100 runs (binomial, 12 processes).

Rows: a compiled model, an op of this package, and where there is a GPU a launch of a Triton kernel,
one of CuTe DSL, and DeepGEMM; the mean of these; a stand-in for a function of DeepGEMM, which does
nothing, so that what is added is not lost in the call; and a compiled model with no seal in either
turn, which shows how far from 0 these measurements are. The device is idle between turns: what is
timed is the host.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import pairwise
from multiprocessing import get_context
from types import ModuleType
from typing import Any

import torch
import typer
from measuring import DEVICE, JsonPath, write
from rich.console import Console
from rich.table import Table
from torch import nn

import compile_ext
from compile_ext.ops import deep_gemm_support
from compile_ext.ops.quantize import quantize_fp8_blocks, quantize_fp8_groups
from compile_ext.tune.timing import Call, synchronize

PROCESSES, TURNS, CALLS = 12, 40, 150
SETTLING = 100  # untimed: Python specialises its bytecode anew where a seal has set an attribute
FP8, ROUTER = ("triton", "deep_gemm"), ("triton_small_m", "cute")


def compiled(backend: str) -> Call:
    model = nn.Linear(16, 16, device=DEVICE).requires_grad_(False)
    run, x = torch.compile(model, backend=backend), torch.randn(4, 16, device=DEVICE)
    return lambda: run(x)


def router(kernel: str) -> Call:
    a = torch.randn(4, 2048, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(64, 2048, device=DEVICE, dtype=torch.bfloat16)
    return lambda: torch.ops.compile_ext.router_gemm(a, b, None, pinned=kernel)


def fp8(kernel: str) -> Call:
    a, scale_a = quantize_fp8_groups(torch.randn(64, 512, device=DEVICE))
    b, scale_b = quantize_fp8_blocks(torch.randn(512, 512, device=DEVICE))
    return lambda: torch.ops.compile_ext.block_scaled_mm(
        a, b, scale_a, scale_b, None, torch.bfloat16, pinned=kernel
    )


def stand_in() -> Call:
    module: Any = ModuleType("deep_gemm")
    module.__spec__ = ModuleSpec("deep_gemm", None)
    module.function = lambda: None
    sys.modules["deep_gemm"] = module
    return lambda: deep_gemm_support.call("function")


def calls() -> Iterator[tuple[str, Call]]:
    for backend in ("eager", "inductor", "compile_ext"):
        yield f"a compiled module, {backend}", compiled(backend)
    yield "router_gemm, reference", router("reference")
    if DEVICE == "cuda":
        yield from ((f"router_gemm, {x}", router(x)) for x in ROUTER)
        yield from ((f"block_scaled_mm, {x}", fp8(x)) for x in FP8)


def turn(call: Call) -> float:
    """ns a call."""
    for _ in range(SETTLING):
        call()
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - start) / CALLS


def measure(
    call: Call, seal: Callable[[], AbstractContextManager[object]] = nullcontext
) -> dict[str, float]:
    """Medians of this process's turns, ns a call."""
    call()  # compiles
    without, under = [turn(call)], []
    for _ in range(TURNS):
        with seal():
            under.append(turn(call))
        without.append(turn(call))
    beside = [(a + b) / 2 for a, b in pairwise(without)]
    added = [a - b for a, b in zip(under, beside, strict=True)]
    return {
        "without": statistics.median(without),
        "under": statistics.median(under),
        "added": statistics.median(added),
    }


def one_process(_: int) -> dict[str, dict[str, float]]:
    gc.disable()
    with torch.inference_mode():
        control = measure(compiled("compile_ext"))
        seal = partial(compile_ext.seal, "error")
        rows = {name: measure(call, seal) for name, call in calls()}
        mean = {x: statistics.fmean(row[x] for row in rows.values()) for x in control}
        rows["the mean of these"] = mean
        rows["a call of DeepGEMM, a stand-in"] = measure(stand_in(), seal)
    return rows | {"a compiled module, compile_ext, no seal in either": control}


def pool(rows: list[dict[str, float]]) -> dict[str, Any]:
    added = sorted(row["added"] for row in rows)
    return {
        **{f"{x}_ns": statistics.median(row[x] for row in rows) for x in rows[0]},
        "low_ns": added[2],
        "high_ns": added[-3],
        "added_by_process_ns": added,
    }


def main(json_path: JsonPath = None) -> None:
    # A process at a time; each is new.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as new:
        processes = new.map(one_process, range(PROCESSES), chunksize=1)
    rows = {name: pool([x[name] for x in processes]) for name in processes[0]}
    table = Table(title=f"ns a call, {PROCESSES} processes of {TURNS} turns of {CALLS} calls")
    for column in ("call", "without", "under a seal", "added", "96 %"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for name, row in rows.items():
        interval = f"{row['low_ns']:.0f} .. {row['high_ns']:.0f}"
        medians = [f"{row[f'{x}_ns']:.0f}" for x in ("without", "under", "added")]
        table.add_row(name, *medians, interval)
    Console().print(table)
    write(json_path, rows=rows)


if __name__ == "__main__":
    typer.run(main)
