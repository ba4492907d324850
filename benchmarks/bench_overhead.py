"""What the backend's wrapper adds to one call of a compiled graph, on the host.

    python benchmarks/bench_overhead.py [--json benchmarks/results/overhead.json]

The compiled graph is replaced by a function that returns at once, so that nothing but the wrapper
is timed: the note of which weights come by, and for each derived constant the look-up and the check
that it is fresh. Wrapper and bare function are timed in turn; a row is the difference of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import typer
from measuring import JsonPath, write
from rich.console import Console
from rich.table import Table
from torch import nn

from compile_ext.backend import _with_constants
from compile_ext.derived import constants
from compile_ext.passes import GraphReport
from compile_ext.passes.derivation import Padding
from compile_ext.records import GraphRecord
from compile_ext.tune.timing import summary

ROUNDS, CALLS = 60, 2000
ROWS = {
    "1 site": (1, 0, True),
    "10 sites": (10, 0, True),
    "200 sites": (200, 0, True),
    "1 site, re-homed": (1, 1, True),
    "10 sites, re-homed": (10, 10, True),
    "200 sites, re-homed": (200, 200, True),
    "1 site, a copy": (1, 1, False),
    "10 sites, copies": (10, 10, False),
    "200 sites, copies": (200, 200, False),
}


def nothing(*args: Any) -> None:
    """Stands for the compiled graph."""


def wrapper(sites: int, count: int, rehome: bool) -> tuple[Callable[..., Any], list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.randn(8, 8)) for _ in range(sites)]
    table = constants(Padding((0, 0, 0, 1), 0.0), parameters[:1], rehome)
    for p in parameters[:count]:
        want = F.pad(p.detach(), (0, 0, 0, 1))
        constant = table.of([p])
        assert constant.value is not None
        assert torch.equal(constant.value, want)
        assert constant.kind.startswith("re-homed" if rehome else "a copy")
    tables = tuple(((i,), table) for i in range(count))
    record = GraphRecord(GraphReport(), None, tuple(range(sites)), constants=tables)
    return _with_constants(nothing, record), parameters


def nanoseconds(call: Callable[..., Any], args: list[nn.Parameter]) -> float:
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call(*args)
    return (time.perf_counter_ns() - start) / CALLS


def measure(sites: int, count: int, rehome: bool) -> dict[str, float]:
    call, args = wrapper(sites, count, rehome)
    added = [nanoseconds(call, args) - nanoseconds(nothing, args) for _ in range(ROUNDS)]
    return summary(added, "ns")


def main(json_path: JsonPath = None) -> None:
    rows = {name: measure(*kind) for name, kind in ROWS.items()}
    table = Table(title=f"ns a call, median of {ROUNDS} rounds of {CALLS} calls")
    for column in ("graph", "added", "quartiles"):
        table.add_column(column, justify="left" if column == "graph" else "right")
    for name, row in rows.items():
        quartiles = f"{row['quartile_low_ns']:.0f} .. {row['quartile_high_ns']:.0f}"
        table.add_row(name, f"{row['ns']:.0f}", quartiles)
    Console().print(table)
    write(json_path, rows=rows)


if __name__ == "__main__":
    typer.run(main)
