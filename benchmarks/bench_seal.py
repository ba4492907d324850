"""What a seal adds to one call, on the host, where nothing is compiled.

    python benchmarks/bench_seal.py [--json benchmarks/results/seal.json]

The same call under a seal and without one, in turn; a row is the two, and their difference. Rows: a
compiled model, an op of this package, and where there is a GPU a launch of a Triton kernel, one of
CuTe DSL, and DeepGEMM; elsewhere a stand-in for DeepGEMM's function, which does nothing. The device
is idle between rounds: what is timed is the host.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
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
from compile_ext.tune.timing import Call, summary, synchronize

ROUNDS, CALLS = 200, 50
SETTLING = 20  # untimed: Python specialises its bytecode anew where a seal has set an attribute
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
    else:
        yield "a call of DeepGEMM, a stand-in", stand_in()


def nanoseconds(call: Call) -> float:
    for _ in range(SETTLING):
        call()
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - start) / CALLS


def measure(call: Call) -> dict[str, dict[str, float]]:
    seal = compile_ext.seal("error")
    call()  # compiles
    call()
    without, under = [], []
    for _ in range(ROUNDS):
        without.append(nanoseconds(call))
        with seal:
            under.append(nanoseconds(call))
    added = [b - a for a, b in zip(without, under, strict=True)]
    found = {"without": without, "under": under, "added": added}
    return {name: summary(values, "ns") for name, values in found.items()}


def main(json_path: JsonPath = None) -> None:
    with torch.inference_mode():
        rows = {name: measure(call) for name, call in calls()}
    table = Table(title=f"ns a call, median of {ROUNDS} rounds of {CALLS} calls")
    for column in ("call", "without", "under a seal", "added", "quartiles of what is added"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for name, row in rows.items():
        added = row["added"]
        quartiles = f"{added['quartile_low_ns']:.0f} .. {added['quartile_high_ns']:.0f}"
        medians = [f"{row[x]['ns']:.0f}" for x in ("without", "under", "added")]
        table.add_row(name, *medians, quartiles)
    Console().print(table)
    write(json_path, rows=rows)


if __name__ == "__main__":
    typer.run(main)
