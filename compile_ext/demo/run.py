"""``compile-ext demo``: eager, torch.compile and compile_ext, and what the passes did."""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from compile_ext.demo.compare import (
    Cached,
    Comparison,
    Forward,
    Trace,
    compare,
    record,
    restore,
)
from compile_ext.demo.decoder import Decoder, Router
from compile_ext.demo.kernels import count_kernels
from compile_ext.explain import explain
from compile_ext.passes import PASS_NAMES
from compile_ext.report import Report

PROMPT_TOKENS, NEW_TOKENS, TIMED_TOKENS = 16, 24, 8
# Of the standard deviation of eager's logits. Inductor keeps float32 where eager rounds to
# bfloat16, so about 1 % of the FP8 bytes differ by one step (6 %). The largest difference in 120
# steps of three random decoders was 0.28.
TOLERANCE = 0.4
# A router whose last chosen and first rejected expert lie closer than this (its logits have a
# deviation of 4) may choose otherwise after such a change: that step computes with another expert
# and is not compared. In those 120 steps no choice changed at all.
DECIDED = 0.2


@dataclass(frozen=True)
class Way:
    """One way to run the model, and what it showed."""

    name: str
    first_seconds: float
    tokens_per_second: float
    kernels: int
    comparison: Comparison | None


def run_decoder(console: Console, verbose: bool) -> bool:
    """The random decoder. Returns whether every comparison held."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Outside inference mode: a weight made inside has no version counter to see updates by.
    model = Decoder().to(device)
    with progress_bar(console) as progress, torch.inference_mode(), one_thread():
        task = progress.add_task("eager", total=NEW_TOKENS)
        step = functools.partial(progress.advance, task)
        prompt = torch.randint(0, model.c.vocab, (PROMPT_TOKENS,), device=device)
        routers = [m for m in model.modules() if isinstance(m, Router)]
        trace = record(model, model, prompt, NEW_TOKENS, routers=routers, step=step)
        tolerance = TOLERANCE * float(torch.stack(trace.logits).std())
        ways = [measure("eager", model, model, trace, None)]
        for name, backend in (("torch.compile", "inductor"), ("compile_ext", "compile_ext")):
            progress.reset(task, description=f"{name}: two graphs", total=NEW_TOKENS)
            compiled = _compile(model, backend)
            start = time.perf_counter()
            comparison = compare(model, compiled, trace, tolerance, DECIDED, step)
            ways.append(
                measure(name, model, compiled, trace, comparison, time.perf_counter() - start)
            )
        report = explain(model)
    show(console, report, ways, verbose)
    return verdict(console, ways)


def _compile(model: nn.Module, backend: str) -> Forward:
    torch._dynamo.reset()
    compiled: Forward = torch.compile(
        model, backend=backend, fullgraph=True, options={"cpp.enable_kernel_profile": True}
    )
    return compiled


def measure(
    name: str,
    model: Cached,
    forward: Forward,
    trace: Trace,
    comparison: Comparison | None,
    first: float = 0.0,
) -> Way:
    """Decode some of the trace's tokens again, and count the kernels of one step."""
    steps = list(zip(trace.tokens, trace.positions, strict=True))[1 : 1 + TIMED_TOKENS]
    restore(model, trace.caches[1])
    seconds = []
    for tokens, positions in steps:
        start = time.perf_counter()
        int(forward(tokens, positions)[-1].argmax())  # waits for a GPU too
        seconds.append(time.perf_counter() - start)
    restore(model, trace.caches[len(steps)])
    kernels = count_kernels(lambda: forward(*steps[-1]))
    return Way(name, first, 1 / statistics.median(seconds), kernels, comparison)


def progress_bar(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        "[progress.description]{task.description}",
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for PyTorch's kernels, which take microseconds here.

    With a second one on a core that others want too, each kernel waits at its barrier: 6 to 9 s a
    token instead of 0.6 s (SmolLM2-135M in eager, 2 cores).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def show(console: Console, report: Report, ways: list[Way], verbose: bool) -> None:
    """Print what the passes did and how each way decodes; every candidate with ``verbose``."""
    if verbose:
        console.print(report)
    console.print(_passes_table(report))
    console.print(_ways_table(ways))
    share = report.pass_seconds / report.compile_seconds
    spent = f"{report.pass_seconds:.2f} s of {report.compile_seconds:.1f} s"
    console.print(f"passes: {spent} of compilation, {share:.1%}")


def _ways_table(ways: list[Way]) -> Table:
    table = Table(title="decoding one token a step (first: compilation and first run)")
    for column in ("", "first, s", "tokens/s", "kernels", "logits off by", "tokens equal"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for way in ways:
        c = way.comparison
        table.add_row(
            way.name,
            f"{way.first_seconds:.1f}" if c else "",
            f"{way.tokens_per_second:.1f}",
            str(way.kernels),
            f"{c.max_error:.2f} <= {c.tolerance:.2f}" if c else "",
            f"{c.tokens_equal} of {c.tokens_decided}" if c else "",
        )
    return table


def _passes_table(report: Report) -> Table:
    fired: Counter[str] = Counter()
    left: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for row in report.rows:
        for d in row.decisions:
            (fired if d.fired else left)[d.pass_name] += 1
            if d.fired:
                examples.setdefault(d.pass_name, f"{row.module}: {d.detail}")
        if row.site:
            fired["collect_sites"] += 1
            examples.setdefault(
                "collect_sites", f"{row.module}: {row.op}, N={row.site.n}, K={row.site.k}"
            )
    table = Table(title="what the passes did")
    for column in ("pass", "fired", "not", "for example"):
        number = column in ("fired", "not")
        table.add_column(column, justify="right" if number else "left", no_wrap=column == "pass")
    for name in PASS_NAMES:
        table.add_row(name, str(fired[name]), str(left[name]), examples.get(name, ""))
    return table


def verdict(console: Console, ways: list[Way]) -> bool:
    """Print for each way whether it agrees with eager. Returns whether all do."""
    ok = True
    for way in ways:
        c = way.comparison
        if c is None:
            continue
        ok &= c.ok
        skipped = (
            f", {c.steps - c.compared} steps with undecided routing left out"
            if c.steps > c.compared
            else ""
        )
        state = "agrees with eager" if c.ok else "DIFFERS from eager"
        console.print(f"{way.name} {state}: {c.compared} of {c.steps} steps compared{skipped}")
    return ok
