"""What an argument that nobody reads, and a fill that somebody reads, cost at each site.

    python benchmarks/bench_fills.py [--json benchmarks/results/fills.json]

A graph of 40 sites in a row, each an op that stands for a small GEMM of one token (x * 2, 7168
bfloat16: it takes no time, so that what is around it shows). The ways to call it:

    nothing       nothing is made for the argument on a call: not to be beaten
    filled        the model fills it on each call
    empty         the model allocates it on each call (vLLM's change, vllm#43677)
    compile_ext   "filled", through ``backend="compile_ext"``; the others through Inductor

``Tensor?``: the schema allows None, which is "nothing". ``Tensor``: it does not, "nothing" hands in
a buffer made before. ``read``: the op reads the scale, "nothing" as for ``Tensor``. ``output``: the
op overwrites a buffer of zeros; "nothing" allocates it. Values are compared with eager's, bit by
bit; each row carries the kernels' names from the profiler. Without a CUDA device nothing is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import typer
from measuring import DEVICE, JsonPath, allocations, kernel_names, write
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.library import Library

import compile_ext
from compile_ext.tune.timing import Call, captured, in_turn, summary

SITES, ROUNDS = 40, 40
WAYS = ("nothing", "filled", "empty", "compile_ext")
LIBRARY = Library("bench_fills", "DEF")
OPS: Any = torch.ops.bench_fills

Site = Callable[[Tensor], Tensor]


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bench_fills::{name}", fake, lib=LIBRARY)
    return getattr(OPS, name).default


def like(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x)


def write_twice(x: Tensor, out: Tensor) -> None:
    torch.mul(x, 2, out=out)


OPTIONAL = define("optional(Tensor x, Tensor? scale) -> Tensor", lambda x, scale: x * 2, like)
PLAIN = define("plain(Tensor x, Tensor scale) -> Tensor", lambda x, scale: x * 2, like)
READ = define("read(Tensor x, Tensor scale) -> Tensor", lambda x, scale: x * scale, like)
OUTPUT = define("output(Tensor x, Tensor(a!) out) -> ()", write_twice, lambda x, out: None)
unread = compile_ext.OpContract(unread={"scale": lambda **_: True})
compile_ext.register_contract(OPTIONAL, unread)
compile_ext.register_contract(PLAIN, unread)
compile_ext.register_contract(OUTPUT, compile_ext.OpContract(overwritten=("out",)))


def into(x: Tensor, out: Tensor) -> Tensor:
    OUTPUT(x, out)
    return out


def sites(one: Tensor) -> dict[str, dict[str, Site]]:
    """For each kind of argument and each way, one site; ``one`` is a buffer made before."""
    return {
        "Tensor?": {
            "nothing": lambda x: OPTIONAL(x, None),
            "filled": lambda x: OPTIONAL(x, x.new_ones(1)),
            "empty": lambda x: OPTIONAL(x, x.new_empty(1)),
        },
        "Tensor": {
            "nothing": lambda x: PLAIN(x, one),
            "filled": lambda x: PLAIN(x, x.new_ones(1)),
            "empty": lambda x: PLAIN(x, x.new_empty(1)),
        },
        "read": {
            "nothing": lambda x: READ(x, one),
            "filled": lambda x: READ(x, x.new_ones(1)),
        },
        "output": {
            "nothing": lambda x: into(x, torch.empty_like(x)),
            "filled": lambda x: into(x, torch.zeros_like(x)),
        },
    }


def forty(site: Site) -> Site:
    def model(x: Tensor) -> Tensor:
        for _ in range(SITES):
            x = site(x)
        return x

    return model


def measure(ways: dict[str, Site], x: Tensor) -> dict[str, Any]:
    torch._dynamo.reset()
    calls: dict[str, Call] = {}
    for name in WAYS:
        if name != "compile_ext" and name not in ways:
            continue
        model = forty(ways["filled" if name == "compile_ext" else name])
        backend = "compile_ext" if name == "compile_ext" else "inductor"
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        calls[name] = lambda compiled=compiled: compiled(x)
        got, want = calls[name](), model(x)
        assert torch.equal(got, want), f"{name} differs from eager"
    if DEVICE == "cpu":
        return {}
    graphs = {name: captured(call) for name, call in calls.items()}
    outside, inside = in_turn(calls, ROUNDS, 5), in_turn(graphs, ROUNDS, 20)
    row: dict[str, Any] = {}
    for name, call in calls.items():
        names = Counter(kernel_names(call))
        row[name] = {
            "outside_us_a_site": summary([t / SITES for t in outside[name]]),
            "graph_us_a_site": summary([t / SITES for t in inside[name]]),
            "kernels": dict(names),
            "launches_a_site": names.total() / SITES,
            "allocations_a_site": allocations(call) / SITES,
        }
    return row


def main(json_path: JsonPath = None) -> None:
    if json_path and DEVICE == "cpu":
        what = "without a CUDA device nothing is timed, and there is nothing to write"
        raise typer.BadParameter(what, param_hint="--json")
    with torch.no_grad():
        x = torch.randn(1, 7168, device=DEVICE).bfloat16()
        one = x.new_ones(1)
        rows = {kind: measure(ways, x) for kind, ways in sites(one).items()}
    console = Console(width=150)
    if DEVICE == "cpu":
        console.print("No CUDA device: the values of all rows equal eager's, nothing was timed.")
        return
    table = Table(title=f"a site, of {SITES} in one graph")
    for column in ("argument", "way", "us", "us in a CUDA graph", "launches", "allocations"):
        table.add_column(column, justify="left" if column in ("argument", "way") else "right")
    for kind, row in rows.items():
        for way, found in row.items():
            figures = [f"{found[k]['us']:.2f}" for k in ("outside_us_a_site", "graph_us_a_site")]
            counts = [f"{found[k]:.2f}" for k in ("launches_a_site", "allocations_a_site")]
            table.add_row(kind, way, *figures, *counts)
    console.print(table)
    write(json_path, rows=rows)


if __name__ == "__main__":
    typer.run(main)
