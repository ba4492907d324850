"""The instructions that a seal adds to one call, counted by callgrind: what ``bench_seal`` cannot
tell, whose processes differ by hundreds of ns and more.

    python benchmarks/count_seal_instructions.py [--json benchmarks/results/seal_instructions.json]

Needs valgrind with its headers, a C compiler, and debug information of the C library and of Python.
The same call in turns without a seal and under one, as in ``bench_seal``, on the CPU with one
thread: user instructions of a turn by the call, lowest and highest of the turns. The allocators of
the C library and of Python are shown by themselves: their work depends on which blocks happen to be
free, and a seal that is put in and taken out allocates some. How many instructions 0.2 us are is
from the time of the same turns without callgrind.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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
# callgrind knows no AVX-512; one hash seed and one thread: less differs from run to run.
_VARIABLES = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}


def take_turns(row: str, marks: Path) -> list[float]:
    """The process that is counted: a turn is a dump. ns a call of each."""
    callgrind = ctypes.CDLL(str(marks))
    gc.disable()
    ns = []
    with torch.inference_mode():
        call = ROWS[row]()
        call()  # compiles
        for name in ["without", "under"] * TURNS:
            with compile_ext.seal("error") if name == "under" else nullcontext():
                for _ in range(SETTLING):
                    call()
                callgrind.begin()
                start = time.perf_counter_ns()
                for _ in range(CALLS):
                    call()
                ns.append((time.perf_counter_ns() - start) / CALLS)
                callgrind.end(name.encode())
    return ns


def count(row: str, marks: Path, folder: Path) -> dict[str, Any]:
    """``ns`` a call, and of each turn ``without`` and ``under`` a seal the instructions a call."""
    python = [sys.executable, __file__, "--row", row, "--marks", str(marks)]

    def run(*before: str) -> str:
        done = subprocess.run(
            [*before, *python], env=os.environ | _VARIABLES, check=True, stdout=subprocess.PIPE
        )
        return done.stdout.decode()

    ns = statistics.median(json.loads(run()))  # Inductor's cache has the graph from here on
    dump = folder / "dump"
    run("valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={dump}")
    turns: dict[str, list[dict[str, float]]] = {"without": [], "under": []}
    for number in range(1, 2 * TURNS + 1):
        name = "without" if number % 2 else "under"
        turns[name].append(instructions(folder / f"dump.{number}", name))
    return {"ns": ns, **turns}


def instructions(dump: Path, name: str) -> dict[str, float]:
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
    assert sum(found.values()) > 0.999 * int(total[1].replace(",", ""))  # all lines were read
    assert found["allocators"] > 0  # their files are known by debug information
    return {kind: n / CALLS for kind, n in found.items()}


def table(rows: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title=f"instructions a call, {TURNS} turns of {CALLS} calls, lowest .. highest")
    columns = ("without a seal", "under a seal", "allocators, without", "under", "0.2 us are")
    shown.add_column("call")
    for column in columns:
        shown.add_column(column, justify="right")
    for name, row in rows.items():
        cells = []
        for kind in ("all else", "allocators"):
            for turns in (row["without"], row["under"]):
                values = [turn[kind] for turn in turns]
                cells.append(f"{min(values):.0f} .. {max(values):.0f}")
        a_call = statistics.median(sum(turn.values()) for turn in row["without"])
        shown.add_row(name, *cells, f"{200 * a_call / row['ns']:.0f}")
    return shown


def main(
    json_path: JsonPath = None,
    row: Annotated[str | None, typer.Option(hidden=True)] = None,
    marks: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    if row is not None and marks is not None:
        print(json.dumps(take_turns(row, marks)))
        return
    with tempfile.TemporaryDirectory() as made:
        source, library = Path(made, "marks.c"), Path(made, "marks.so")
        source.write_text(MARKS)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
        rows = {name: count(name, library, Path(made)) for name in ROWS}
    Console(width=140).print(table(rows))
    write(json_path, rows=rows)


if __name__ == "__main__":
    typer.run(main)
