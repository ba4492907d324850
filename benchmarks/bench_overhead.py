"""What compile_ext adds to a call on the host, against plain torch.compile, in one process.

    python benchmarks/bench_overhead.py [--json benchmarks/results/overhead.json]

Each row is a graph: one without candidates, one with GEMM sites (their weights are noted), one with
derived constants (looked up and checked for freshness). The graphs do next to nothing, so that the
host is what is timed. Both sides are compiled first, checked for equal results, then timed in turn.
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import FunctionType
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import compile_ext
from compile_ext.ops import router_gemm

ROUNDS, CALLS = 40, 500


class Plain(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8).bfloat16() for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + weight[0]
        return x


class Sites(Plain):
    def forward(self, x: Tensor) -> Tensor:
        out = x.float()
        for weight in self.weights:
            out = out + router_gemm(x, weight)
        return out


class Constants(Plain):
    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + F.pad(weight, (0, 0, 0, 1))[8]
        return x


GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "no candidates": lambda: Plain(1),
    "1 site": lambda: Sites(1),
    "10 sites": lambda: Sites(10),
    "1 constant": lambda: Constants(1),
    "10 constants": lambda: Constants(10),
}


def seconds_per_call(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call(x)
    return (time.perf_counter() - start) / CALLS


def compiled(model: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    """Compile a copy of the class, with code of its own: Dynamo keeps its entries on the code."""
    kind = type(model)
    code = kind.forward.__code__.replace()
    forward = FunctionType(code, kind.forward.__globals__)
    twin = copy.copy(model)
    twin.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    call: Callable[[Tensor], Tensor] = torch.compile(twin, backend=backend)
    return call


def measure(model: nn.Module) -> dict[str, float]:
    x = torch.randn(2, 8).bfloat16()
    calls = {name: compiled(model, name) for name in ("inductor", "compile_ext")}
    want = calls["inductor"](x)
    assert torch.equal(calls["compile_ext"](x), want)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(seconds_per_call(call, x) * 1e6)
    added = [b - a for a, b in zip(times["inductor"], times["compile_ext"], strict=True)]
    quartiles = statistics.quantiles(added, n=4)
    return {
        "inductor_us": statistics.median(times["inductor"]),
        "compile_ext_us": statistics.median(times["compile_ext"]),
        "added_us": statistics.median(added),
        "added_iqr_us": quartiles[2] - quartiles[0],
    }


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="write the results here")] = None,
) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = {name: measure(make()) for name, make in GRAPHS.items()}
    table = Table(title=f"us a call, median of {ROUNDS} rounds of {CALLS} calls each")
    for column in ("graph", "torch.compile", "compile_ext", "added", "quartile range of added"):
        table.add_column(column, justify="left" if column == "graph" else "right")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console().print(table)
    if json_path:
        about = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu": _cpu(),
            "command": "python benchmarks/bench_overhead.py",
            "compile_ext": compile_ext.__version__,
        }
        json_path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(": ")[1] for x in lines if x.startswith("model name")), "unknown")


if __name__ == "__main__":
    typer.run(main)
