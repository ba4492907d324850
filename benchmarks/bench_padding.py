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

import json
import logging
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch._inductor import metrics
from torch._inductor.compile_fx import inductor_metrics_log
from torch.profiler import ProfilerActivity, profile

import compile_ext
from compile_ext.ops import quantize_fp8_per_token, scaled_mm

CALLS, ROUNDS = 20, 40
COLUMNS = ("each call", "vLLM", "vLLM, fused", "nothing left", "compile_ext")
AROUND = "producer and reader"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    n: int
    k: int
    bias: bool
    is_head: bool = False


CASES = (
    Case(3420, 1280, True),
    Case(1280, 3420, True),
    Case(50257, 768, False, is_head=True),
    Case(4300, 4096, False),
)
TOKENS = (1, 16, 64, 256, 2048)


def up(size: int) -> int:
    return -(-size // 16) * 16


def produce(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_fp8_per_token(F.gelu(x))


def read(y: Tensor, residual: Tensor | None) -> Tensor:
    return y.amax(-1) if residual is None else y + residual


class Linear(nn.Module):
    """The linear in its place, with its weights as a checkpoint stores them."""

    def __init__(self, n: int, k: int, case: Case) -> None:
        super().__init__()
        w, scale = quantize_fp8_per_token(torch.randn(n, k, device=DEVICE))
        self.w, self.scale = (nn.Parameter(t, requires_grad=False) for t in (w, scale))
        bias = torch.randn(n, device=DEVICE).bfloat16() if case.bias else None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        a, scale = produce(x)
        return read(scaled_mm(a, self.w, scale, self.scale, self.bias), residual)


def pad_last(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[-1]))


class PadEachCall(Linear):
    def gemm(self, a: Tensor, scale: Tensor) -> Tensor:
        n, k = self.w.shape
        w = F.pad(self.w, (0, up(k) - k, 0, up(n) - n))
        scale_b = F.pad(self.scale, (0, 0, 0, up(n) - n), value=1.0)
        return self._multiply(a, scale, w, scale_b)

    def _multiply(self, a: Tensor, scale: Tensor, w: Tensor, scale_b: Tensor) -> Tensor:
        n = self.w.shape[0]
        bias = None if self.bias is None else pad_last(self.bias, w.shape[0])
        out = scaled_mm(pad_last(a, w.shape[1]), w, scale, scale_b, bias)
        return out[:, :n].contiguous() if w.shape[0] != n else out


class PadAtLoad(PadEachCall):
    def __init__(self, n: int, k: int, case: Case) -> None:
        super().__init__(n, k, case)
        self.padded = F.pad(self.w, (0, up(k) - k, 0, up(n) - n))
        self.padded_scale = F.pad(self.scale, (0, 0, 0, up(n) - n), value=1.0)

    def gemm(self, a: Tensor, scale: Tensor) -> Tensor:
        return self._multiply(a, scale, self.padded, self.padded_scale)


class Padded(PadAtLoad):
    def gemm(self, a: Tensor, scale: Tensor) -> Tensor:
        bias = self.padded_bias
        out = scaled_mm(a, self.padded, scale, self.padded_scale, bias)
        return out[:, : self.w.shape[0]]

    def __init__(self, n: int, k: int, case: Case) -> None:
        super().__init__(n, k, case)
        self.padded_bias = None if self.bias is None else pad_last(self.bias, up(n))


Call = Callable[[], Any]
compiled_produce = torch.compile(produce, dynamic=False)
compiled_read = torch.compile(read, dynamic=False)


def pieces(model: PadEachCall, x: Tensor, residual: Tensor | None) -> Call:
    """Producer and reader compiled, what is between them as ATen ops."""
    return lambda: compiled_read(model.gemm(*compiled_produce(x)), residual)


@dataclass(frozen=True)
class Column:
    call: Call
    model: Linear
    x: Tensor
    residual: Tensor | None


def build(case: Case, m: int) -> dict[str, Column]:
    n, k = case.n, case.k
    x = torch.randn(m, k, device=DEVICE).bfloat16()
    residual = None if case.is_head else torch.randn(m, n, device=DEVICE).bfloat16()
    each, load, ours = PadEachCall(n, k, case), PadAtLoad(n, k, case), Linear(n, k, case)
    fused, stored = PadAtLoad(n, k, case), Padded(n, k, case)
    long = pad_last(x, up(k))

    def whole(model: PadEachCall, x: Tensor) -> Tensor:
        return read(model.gemm(*produce(x)), residual)

    run_whole = torch.compile(whole, dynamic=False)
    run_ours = torch.compile(ours, backend="compile_ext", dynamic=False)
    calls: dict[str, tuple[Call, Linear]] = {
        "each call": (pieces(each, x, residual), each),
        "vLLM": (pieces(load, x, residual), load),
        "vLLM, fused": (lambda: run_whole(fused, x), fused),
        "nothing left": (lambda: run_whole(stored, long), stored),
        "compile_ext": (lambda: run_ours(x, residual), ours),
    }
    return {name: Column(call, model, x, residual) for name, (call, model) in calls.items()}


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
    if DEVICE == "cpu":
        return compiled, [f"{generated} of Inductor"]
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    events = profiled.events() or []
    names = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return compiled, names


def largest_error(column: Column, got: Tensor) -> float:
    """Against float64 on the same quantized operands, relative to the largest value."""
    a, scale = compiled_produce(column.x)
    model = column.model
    exact = (a.double() * scale.double()) @ (model.w.double() * model.scale.double()).t()
    exact = exact if model.bias is None else exact + model.bias.double()
    exact = read(exact, None if column.residual is None else column.residual.double())
    return float((got.double() - exact).abs().max() / exact.abs().max())


def time_in_turn(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Microseconds a call, of CUDA graphs replayed in turn."""
    graphs = {}
    for name, call in calls.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / CALLS)
    return times


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
        for name, times in time_in_turn(calls).items():
            low, middle, high = statistics.quantiles(times, n=4)
            timing = {"us": middle, "quartile_low_us": low, "quartile_high_us": high}
            row[name] = {**row.get(name, {}), **timing}
    return row


def memory() -> dict[str, int]:
    """Bytes on the device while 8 layers with N = 3420 are folded, above the start."""
    torch._dynamo.reset()
    layers = [Linear(3420, 1280, CASES[0]) for _ in range(8)]

    def forward(x: Tensor) -> Tensor:
        return torch.stack([layer(x, None) for layer in layers])

    x = torch.randn(1, 1280, device=DEVICE).bfloat16()
    run = torch.compile(forward, backend="compile_ext")
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(x)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - start
    after = torch.cuda.memory_allocated() - start
    parameters = [p for layer in layers for p in layer.parameters()]
    pads = sum(4 * p[0].numel() * p.element_size() for p in parameters)
    largest = max(p.numel() * p.element_size() for p in parameters)
    return {"peak": peak, "after": after, "pad_rows": pads, "largest_weight": largest}


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="write the results here")] = None,
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
    if json_path:
        about = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
            "cuda": torch.version.cuda,
            "command": "python benchmarks/bench_padding.py",
            "compile_ext": compile_ext.__version__,
        }
        result = {**about, "rows": rows, "memory": held}
        json_path.write_text(json.dumps(result, indent=1) + "\n")


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
