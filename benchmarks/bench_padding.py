"""FP8 linears whose N or K is no multiple of 16: what padding costs per call.

    python benchmarks/bench_padding.py [--json benchmarks/results/padding.json]

Each row is a linear in its place: gelu, per-token quantization, the FP8 GEMM, and a reader of its
output (a residual add; for the LM head the largest logit). Columns:

    each call     weight, scale, bias and activation are padded and the output is copied, as ATen
                  ops
    vLLM          weight and scale were padded at load time; bias and activation are padded and the
                  output is copied on each call, as ATen ops (vLLM 0.33's CutlassFP8ScaledMM)
    vLLM, fused   the same, all of it in one Inductor graph
    nothing left  weights, scale and bias are stored padded, the input has K' columns already, and
                  the reader reads the first N columns of what the GEMM gives: not to be beaten
    compile_ext   torch.compile(backend="compile_ext") on the unaligned model

The producer and the reader are the same Inductor kernels in the first two columns. On a CUDA device
20 calls are captured in a CUDA graph; graphs are replayed in turn, and a figure is the median of a
call. The weight stays in the L2 cache where it fits: compare within a row. "linear alone" compares
what remains when the producer and the reader, timed by themselves, are taken off. Results are
checked against float64 first. Without a CUDA device only kernels and bytes are counted, in
Inductor's output.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import torch
import typer
from measuring import DEVICE, JsonPath, kernel_names, write
from padding_models import (
    CASES,
    COLUMNS,
    Case,
    Column,
    Linear,
    build,
    compiled_produce,
    compiled_read,
    read,
    up,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.compile_fx import inductor_metrics_log

from compile_ext.tune.timing import Call, captured, in_turn, summary

CALLS, ROUNDS = 20, 40
AROUND = "producer and reader"
TOKENS = (1, 16, 64, 256, 2048)


def padding_bytes(case: Case, m: int, column: str) -> int:
    """Read and written by the ATen ops around the GEMM, and by the GEMM."""
    n, k, n2, k2 = case.n, case.k, up(case.n), up(case.k)
    bias = 2 if case.bias else 0
    gemm = m * k2 + n2 * k2 + 4 * (m + n2) + bias * n2 + 2 * m * n2
    activation = m * (k + k2) if k != k2 else 0
    rows = bias * (n + n2) + 2 * m * (n + n) if n != n2 else 0  # bias, and the copy of the output
    weight = n * k + n2 * k2 + (4 * (n + n2) if n != n2 else 0)
    return gemm + activation + rows + (weight if column == "each call" else 0)


def compile_and_count(call: Call) -> tuple[int, list[str]]:
    """Bytes that Inductor's graphs read and write, and kernels (on a CPU: how many it wrote)."""
    metrics.reset()
    inductor_metrics_log.setLevel(logging.INFO)  # Inductor counts bytes only for its log
    inductor_metrics_log.propagate = False
    no_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    with no_cache, torch._inductor.config.patch(fx_graph_cache=False):
        call()
    compiled, generated = metrics.num_bytes_accessed, metrics.generated_kernel_count
    return compiled, [f"{generated} of Inductor"] if DEVICE == "cpu" else kernel_names(call)


def largest_error(column: Column, got: Tensor) -> float:
    """Against float64 on the same quantized operands, relative to the largest value."""
    a, scale = compiled_produce(column.x)
    model = column.model
    exact = (a.double() * scale.double()) @ (model.w.double() * model.scale.double()).t()
    exact = exact if model.bias is None else exact + model.bias.double()
    exact = read(exact, None if column.residual is None else column.residual.double())
    return float((got.double() - exact).abs().max() / exact.abs().max())


def measure(case: Case, m: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    columns = build(case, m)
    for name, column in columns.items():
        torch._dynamo.reset()  # each column compiles, and counts, all that it runs
        nbytes, kernels = compile_and_count(column.call)
        if name in ("each call", "vLLM"):
            nbytes += padding_bytes(case, m, name)
        error = largest_error(column, column.call())
        # One rounding to bfloat16 of the GEMM's output and one of the sum, and what cuBLASLt's
        # accumulation loses (0.3 % of the largest element seen at K = 7168).
        assert error < 2.0**-7, (name, case, m, error)
        assert not any("gemmSN" in k or "sgemm" in k for k in kernels), f"{name} timed a fallback"
        row[name] = {"kernels": kernels, "bytes": nbytes, "largest_error": error}
    if DEVICE == "cuda":
        for column in columns.values():  # the resets above dropped all but the last column
            column.call()
            column.call()
        calls = {name: column.call for name, column in columns.items()}
        x, residual = columns["compile_ext"].x, columns["compile_ext"].residual
        y = torch.randn(m, case.n, device=DEVICE).bfloat16()
        calls[AROUND] = lambda: (compiled_produce(x), compiled_read(y, residual))
        calls[AROUND]()
        graphs = {name: captured(call, CALLS) for name, call in calls.items()}
        for name, times in in_turn(graphs, ROUNDS, events=True).items():
            row[name] = {**row.get(name, {}), **summary([t / CALLS for t in times])}
    return row


def memory() -> dict[str, int]:
    """Bytes on the device while 8 layers of the first case are folded, above the start."""
    torch._dynamo.reset()
    case = CASES[0]
    layers = [Linear(case) for _ in range(8)]

    def forward(x: Tensor) -> Tensor:
        return torch.stack([layer(x, None) for layer in layers])

    x = torch.randn(1, case.k, device=DEVICE).bfloat16()
    run = torch.compile(forward, backend="compile_ext")
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(x)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - start
    after = torch.cuda.memory_allocated() - start
    parameters = [p for layer in layers for p in layer.parameters()]
    rows = up(case.n) - case.n
    pads = sum(rows * p[0].numel() * p.element_size() for p in parameters)
    largest = max(p.numel() * p.element_size() for p in parameters)
    return {"peak": peak, "after": after, "pad_rows": pads, "largest_weight": largest}


def main(
    json_path: JsonPath = None,
    tokens: Annotated[str, typer.Option(help="values of M")] = ",".join(map(str, TOKENS)),
) -> None:
    rows = []
    work = [(case, m) for case in CASES for m in map(int, tokens.split(","))]
    # Not inference_mode: the padding of weights that are made there is not folded.
    with torch.no_grad():
        for case, m in track(work, description="measuring"):
            rows.append({"n": case.n, "k": case.k, "m": m, "columns": measure(case, m)})
        held = memory() if DEVICE == "cuda" else None
    table = Table(title="us a call (kernels)" if DEVICE == "cuda" else "bytes a call (kernels)")
    for column in ("N, K", "M", *COLUMNS, "of nothing left", "vLLM / ours", "linear alone"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(f"{r['n']}, {r['k']}", str(r["m"]), *cells(r["columns"]))
    console = Console(width=150)
    console.print(table)
    if held:
        console.print(f"memory while folding 8 layers, bytes above the start: {held}")
    write(json_path, rows=rows, memory=held)


def cells(columns: dict[str, Any]) -> list[str]:
    if DEVICE == "cpu":
        shown = [f"{columns[c]['bytes']} ({columns[c]['kernels'][0]})" for c in COLUMNS]
        return [*shown, "", "", ""]
    us = {c: columns[c]["us"] for c in (*COLUMNS, AROUND)}
    shown = [f"{us[c]:.2f} ({len(columns[c]['kernels'])})" for c in COLUMNS]
    ours, vllm = us["compile_ext"], us["vLLM"]
    alone = (vllm - us[AROUND]) / (ours - us[AROUND])
    ratios = ours / us["nothing left"], vllm / ours, alone
    return [*shown, *(f"{r:.2f}" for r in ratios)]


if __name__ == "__main__":
    typer.run(main)
