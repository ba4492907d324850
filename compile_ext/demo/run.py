"""``compile-ext demo``: generate with eager, torch.compile and compile_ext, compare them, say what the passes did."""

from __future__ import annotations

import time
from collections import Counter

from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from compile_ext.demo.compare import Cached, Comparison, Forward, Trace, compare, record
from compile_ext.demo.decoder import Decoder, Router
from compile_ext.demo.kernels import count_kernels
from compile_ext.explain import Report, explain
from compile_ext.passes import PASS_NAMES

PROMPT_TOKENS, NEW_TOKENS = 16, 24
# Of the standard deviation of eager's logits. Inductor keeps float32 where eager rounds to bfloat16, so about 1 % of
# the FP8 bytes differ by one step (6 %), which moves the logits of two layers by up to a fifth of that deviation.
TOLERANCE = 0.5
# A router whose last chosen and first rejected expert lie closer than this (logits have a deviation of 4) may choose
# otherwise after such a change; the step then computes with another expert and is not compared.
DECIDED = 0.5


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
    model = (
        Decoder()
    )  # outside inference mode: a weight made inside has no version counter to see updates by
    with _progress(console) as progress, torch.inference_mode():
        task = progress.add_task("eager", total=None)
        prompt = torch.randint(0, model.c.vocab, (PROMPT_TOKENS,))
        routers = [m for m in model.modules() if isinstance(m, Router)]
        trace = record(model, model, prompt, NEW_TOKENS, routers=routers)
        tolerance = TOLERANCE * float(torch.stack(trace.logits).std())
        ways = [_measure("eager", model, model, trace, None)]
        for name, backend in (("torch.compile", "inductor"), ("compile_ext", "compile_ext")):
            progress.update(task, description=f"{name}: compiling two graphs")
            compiled = _compile(model, backend)
            start = time.perf_counter()
            comparison = compare(model, compiled, trace, tolerance, DECIDED)
            ways.append(
                _measure(name, model, compiled, trace, comparison, time.perf_counter() - start)
            )
        report = explain(model)
    _show(console, report, ways, verbose)
    return _verdict(console, ways)


def _compile(model: nn.Module, backend: str) -> Forward:
    torch._dynamo.reset()
    compiled: Any = torch.compile(
        model, backend=backend, fullgraph=True, options={"cpp.enable_kernel_profile": True}
    )
    return compiled  # type: ignore[no-any-return]


def _measure(
    name: str,
    model: Cached,
    forward: Forward,
    trace: Trace,
    comparison: Comparison | None,
    first: float = 0.0,
) -> Way:
    """Decode again, free-running on the trace's tokens, and count the kernels of one step."""
    steps = list(zip(trace.tokens, trace.positions, strict=True))[1:]
    start = time.perf_counter()
    for tokens, positions in steps:
        forward(tokens, positions)
    seconds = time.perf_counter() - start
    kernels = count_kernels(lambda: forward(*steps[-1]))
    return Way(name, first, len(steps) / seconds, kernels, comparison)


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), "[progress.description]{task.description}", TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _show(console: Console, report: Report, ways: list[Way], verbose: bool) -> None:
    if verbose:
        console.print(report)
    console.print(_passes_table(report))
    table = Table(title="decoding one token a step")
    for column in (
        "",
        "compile + first run, s",
        "tokens/s",
        "kernels a step",
        "max logit difference",
        "tokens equal",
    ):
        table.add_column(column, justify="right" if column else "left")
    for way in ways:
        c = way.comparison
        table.add_row(
            way.name,
            f"{way.first_seconds:.1f}" if c else "",
            f"{way.tokens_per_second:.1f}",
            str(way.kernels),
            f"{c.max_error:.3f} (at most {c.tolerance:.3f})" if c else "",
            f"{c.tokens_equal} of {c.tokens_decided} decided" if c else "",
        )
    console.print(table)
    total = report.pass_seconds + report.compile_seconds
    console.print(
        f"passes: {report.pass_seconds:.2f} s of {total:.1f} s in the backend, {report.pass_seconds / total:.1%}"
    )


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
            fired["collect_gemm_sites"] += 1
            examples.setdefault(
                "collect_gemm_sites", f"{row.module}: {row.op}, N={row.site.n}, K={row.site.k}"
            )
    table = Table(title="what the passes did")
    for column in ("pass", "fired", "left alone", "for example"):
        table.add_column(column, justify="right" if column in ("fired", "left alone") else "left")
    for name in PASS_NAMES:
        table.add_row(name, str(fired[name]), str(left[name]), examples.get(name, ""))
    return table


def _verdict(console: Console, ways: list[Way]) -> bool:
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
