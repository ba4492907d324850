"""``compile-ext tune``: measure, write the table, and show what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table as Shown

from compile_ext.ops import device_tables, kernel_table
from compile_ext.ops.define import OpDefinition, definitions
from compile_ext.ops.device_tables import Machine
from compile_ext.ops.errors import DeviceError, OptionError, TableError
from compile_ext.ops.kernel_table import Row, Table
from compile_ext.tune.choose import fastest, rows_of
from compile_ext.tune.measure import Clock, GraphClock, Measurement, measure
from compile_ext.tune.operands import OPERANDS

# 17 and 65: a kernel for up to 16 or 64 tokens gets a row that ends there.
TOKENS = (1, 2, 4, 8, 16, 17, 32, 64, 65, 128, 256, 512, 1024, 2048, 4096)
_WHERE = "compile-ext tune"
Shape = tuple[int, int]


@torch.no_grad()
def tune(
    console: Console,
    ops: Sequence[str],
    shapes: Sequence[Shape] | None,
    tokens: Sequence[int],
    ship: Path | None,
    command: str,
) -> Path:
    """Measure on the current CUDA device, and write the table.

    Args:
        ops: by name, of those in ``operands.OPERANDS``.
        shapes: N and K; None for those of each op in ``operands.OPERANDS``.
        tokens: values of M.
        ship: the file to write; None for the user's own table of this machine.
        command: what is noted in the table.

    Returns:
        The file.

    Raises:
        OptionError: an op that cannot be measured.
        DeviceError: no CUDA device.
        TableError: the file cannot be written.
    """
    for op in ops:
        if op not in OPERANDS:
            wanted = ", ".join(OPERANDS)
            raise OptionError(_WHERE, f"--op {op}", wanted, "name one of them, or leave it out")
    if not torch.cuda.is_available():
        fix = "run it on the machine that serves; compile-ext doctor says what is missing"
        raise DeviceError(_WHERE, "no CUDA device", "the GPU whose kernels are measured", fix)
    here = device_tables.machine(torch.cuda.current_device())
    path = ship or device_tables.user_file(here)
    kernel_table.require_writable(path)  # before minutes of measuring
    measured = run(ops, shapes, tokens, GraphClock(), console)
    kernel_table.write(path, _merged(path, here, rows(measured), command))
    console.print(shown(measured))
    for text in faults(measured):
        console.print(text, style="red")
    console.print(f"written: {path}", soft_wrap=True)
    return path


def run(
    ops: Sequence[str],
    shapes: Sequence[Shape] | None,
    tokens: Sequence[int],
    clock: Clock,
    console: Console,
    device: str = "cuda",
) -> list[Measurement]:
    """All measurements, the weights of one shape at a time."""
    found: list[Measurement] = []
    todo = [(d, shape) for d in _defined(ops) for shape in shapes or OPERANDS[d.name].shapes]
    for definition, (n, k) in track(todo, description="shapes", console=console):
        operands = OPERANDS[definition.name]
        weights = operands.weights(n, k, device)
        found += [measure(definition, operands, weights, m, clock) for m in sorted(set(tokens))]
    return found


def rows(measured: Iterable[Measurement]) -> list[Row]:
    """The rows of a table."""
    by_shape: dict[tuple[str, int, int], dict[int, str | None]] = {}
    for x in measured:
        by_shape.setdefault((x.op, x.n, x.k), {})[x.m] = fastest(x.timings)
    return [row for shape, by_m in by_shape.items() for row in rows_of(*shape, by_m)]


def shown(measured: Sequence[Measurement]) -> Shown:
    """Each measurement, with the kernel that the table gets."""
    names = list(dict.fromkeys(name for x in measured for name in x.timings))
    table = Shown("op", "N, K", "M", *names, title="us a layer, median; * is first in the table")
    for x in measured:
        best = fastest(x.timings)
        cells = [
            f"{x.timings[name].us:.2f}{' *' if name == best else ''}" if name in x.timings else "-"
            for name in names
        ]
        table.add_row(x.op, f"{x.n}, {x.k}", str(x.m), *cells)
    return table


def faults(measured: Iterable[Measurement]) -> list[str]:
    """What is wrong with a kernel, a line each: it is in no row."""
    return [
        f"{x.op} {x.n}, {x.k}, M = {x.m}: kernel {name}: {fault}"
        for x in measured
        for name, fault in x.faults.items()
    ]


def _defined(ops: Sequence[str]) -> list[OpDefinition]:
    by_name = {d.name: d for d in definitions()}
    return [by_name[op] for op in ops]


def _merged(path: Path, here: Machine, new: Sequence[Row], command: str) -> Table:
    """The new rows, and those of other shapes that the file has from this machine; of these the
    commands too."""
    fresh = {(x.op, x.n, x.k) for x in new}
    old = _table_of(path, here)
    kept = [x for x in old.rows if (x.op, x.n, x.k) not in fresh] if old else []
    if old and kept:
        command = "; ".join(dict.fromkeys([*old.command.split("; "), command]))
    today = date.today().isoformat()
    return Table(here.arch, here.gpu, here.versions, today, command, tuple(sorted([*kept, *new])))


def _table_of(path: Path, here: Machine) -> Table | None:
    try:
        old = kernel_table.read(path)
    except TableError:  # none yet, or a broken one: measured anew
        return None
    return old if device_tables.fits(old, here) else None
