"""The instructions that a seal adds to one call, counted by callgrind: what ``bench_seal`` cannot
tell, whose processes differ by more than the bar.

    python benchmarks/count_seal_instructions.py [--json benchmarks/results/seal_instructions.json]

Needs valgrind with its headers, and a C compiler. The same call in turns without a seal and under
one, as in ``bench_seal``, on the CPU with one thread; user instructions, medians of the turns. The
C library's and Python's allocators are shown for themselves: their work depends on which blocks
happen to be free, and a seal that is put in and taken out allocates some.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench_seal import SETTLING, compiled, router, stand_in
from measuring import JsonPath, write
from rich.console import Console
from rich.table import Table

import compile_ext

TURNS, CALLS = 5, 1000
ROWS = {
    "a compiled module, eager": partial(compiled, "eager"),
    "a compiled module, inductor": partial(compiled, "inductor"),
    "a compiled module, compile_ext": partial(compiled, "compile_ext"),
    "router_gemm, reference": partial(router, "reference"),
    "a call of DeepGEMM, a stand-in": stand_in,
}
MARKS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""
_ALLOCATORS = ("/malloc.c:", "/obmalloc.c:")
# callgrind knows no AVX-512; one hash seed and one thread: nothing differs from run to run.
_VARIABLES = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}


def take_turns(row: str, marks: Path) -> None:
    """What runs under callgrind: a turn is a dump."""
    callgrind = ctypes.CDLL(str(marks))
    gc.disable()
    with torch.inference_mode():
        call = ROWS[row]()
        call()  # compiles
        for name in ["without", "under"] * TURNS:
            with compile_ext.seal("error") if name == "under" else nullcontext():
                for _ in range(SETTLING):
                    call()
                callgrind.begin()
                for _ in range(CALLS):
                    call()
                callgrind.end(name.encode())


def count(row: str, folder: Path) -> dict[str, dict[str, float]]:
    """Instructions a call: ``{"without" | "under": {"allocators" | "all else"}}``."""
    source, marks, dump = folder / "marks.c", folder / "marks.so", folder / "dump"
    source.write_text(MARKS)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", marks], check=True)
    python = [sys.executable, __file__, "--row", row, "--marks", str(marks)]
    environment = os.environ | _VARIABLES
    quiet = {"env": environment, "check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(python, **quiet)  # Inductor's cache has the graph then
    valgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"]
    subprocess.run([*valgrind, f"--callgrind-out-file={dump}", *python], **quiet)
    turns: dict[str, list[Counter[str]]] = {"without": [], "under": []}
    for number in range(1, 2 * TURNS + 1):
        name = "without" if number % 2 else "under"
        turns[name].append(instructions(folder / f"dump.{number}", name))
    return {name: medians(counters) for name, counters in turns.items()}


def instructions(dump: Path, name: str) -> Counter[str]:
    assert f"Client Request: {name}\n" in dump.read_text()
    annotate = ["callgrind_annotate", "--threshold=100", str(dump)]
    text = subprocess.run(annotate, capture_output=True, text=True, check=True).stdout
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if function := re.match(r"\s*([\d,]+) +\([ \d.]+%\) +(\S+:.*)", line):
            kind = "allocators" if any(x in function[2] for x in _ALLOCATORS) else "all else"
            found[kind] += int(function[1].replace(",", ""))
    total = re.search(r"([\d,]+) .*PROGRAM TOTALS", text)
    assert total is not None
    assert found.total() > 0.999 * int(total[1].replace(",", ""))  # all lines were read
    return found


def medians(turns: list[Counter[str]]) -> dict[str, float]:
    kinds = ("allocators", "all else")
    return {x: statistics.median(turn[x] for turn in turns) / CALLS for x in kinds}


def main(
    json_path: JsonPath = None,
    row: Annotated[str | None, typer.Option(hidden=True)] = None,
    marks: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    if row is not None and marks is not None:
        take_turns(row, marks)
        return
    rows = {}
    for name in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = count(name, Path(folder))
    table = Table(title=f"instructions a call, medians of {TURNS} turns of {CALLS} calls")
    for column in ("call", "without a seal", "a seal adds", "allocators add"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for name, found in rows.items():
        added = {x: found["under"][x] - found["without"][x] for x in found["under"]}
        total = sum(found["without"].values())
        columns = (total, added["all else"], added["allocators"])
        table.add_row(name, *(f"{x:.0f}" for x in columns))
    Console().print(table)
    write(json_path, rows=rows)


if __name__ == "__main__":
    typer.run(main)
