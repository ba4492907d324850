"""Block-scaled FP8 GEMMs: every kernel of ``block_scaled_mm``, cuBLAS in bfloat16, and the floors.

    python benchmarks/bench_fp8_gemm.py [--json benchmarks/results/fp8_gemm.json] [--tokens 1,2,4]

Up to 40 layers with as many weights are captured in one CUDA graph; before each replay 512 MB are
read, outside of the timed region, so that no weight is left in the L2 by luck. A figure is the
median of a layer, replays of the kernels in turn. Inputs are random; each kernel is first checked
against float32 on the dequantized operands (relative error at most 1e-2 in bfloat16), and its row
carries the names that the profiler gives its kernels. Activations are FP8 with column-major scales,
as ``quantize_fp8_groups`` leaves them; "bf16 in" is the same call with a bfloat16 activation, which
the kernel quantizes itself. A kernel that can fetches its weight before its PDL wait, as all calls
of a model but the first do.

    bytes   weight, scales, activations and output once, at 4.3 TB/s (an H200's copy)
    flops   2 M N K at 1,580 TFLOP/s (twice the 790 of bfloat16 matrix products)
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
import typer
from measuring import JsonPath, kernel_names, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from compile_ext.ops import dequantize_fp8_blocks, dequantize_fp8_groups, quantize_fp8_groups
from compile_ext.ops.block_scaled_mm import OP
from compile_ext.ops.define import Kernel, definition_of
from compile_ext.tune.measure import RELATIVE_ERROR, GraphClock, candidates, relative_error
from compile_ext.tune.operands import OPERANDS, SHAPES, Weights
from compile_ext.tune.timing import Call, summary

TOKENS = "1,2,4,8,16,64,256,1024,4096"
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 1580e6


def kernels() -> dict[str, Kernel]:
    definition = definition_of(OP)
    assert definition is not None
    return {k.name: k for k in candidates(definition)}


def in_bfloat16(weights: Weights) -> list[Tensor]:
    pairs = zip(weights.b, weights.scales, strict=True)
    return [dequantize_fp8_blocks(b, scale).bfloat16() for b, scale in pairs]


def columns(weights: Weights, m: int) -> tuple[dict[str, Call], dict[str, str]]:
    """All layers by each kernel that can run them, and why the others cannot."""
    x = torch.randn(m, weights.k, device="cuda").bfloat16()
    a, scale_a = quantize_fp8_groups(x)
    layers = list(zip(weights.b, weights.scales, strict=True))
    dense = in_bfloat16(weights)
    want = dequantize_fp8_groups(a, scale_a) @ dequantize_fp8_blocks(*layers[0]).t()
    calls: dict[str, Call] = {}
    reasons: dict[str, str] = {}
    for name, kernel in kernels().items():
        for label, left, scale in ((name, a, scale_a), (f"{name}, bf16 in", x, None)):
            first = left, layers[0][0], scale, layers[0][1], None, torch.bfloat16
            reason = kernel.why_not(*first)
            if reason is not None:
                reasons[label] = reason
                continue
            out = kernel.launch(first, prefetch=True)
            assert isinstance(out, Tensor)
            error = relative_error(out, want)
            assert error <= RELATIVE_ERROR, f"{label} at {m, weights.n, weights.k}: {error:.2e}"

            def call(kernel: Any = kernel, left: Tensor = left, scale: Any = scale) -> None:
                for b, scale_b in layers:
                    args = left, b, scale, scale_b, None, torch.bfloat16
                    kernel.launch(args, prefetch=True)

            calls[label] = call

    def bf16() -> None:
        for w in dense:
            torch.mm(x, w.t())

    calls["cuBLAS bf16"] = bf16
    return calls, reasons


def floors_us(m: int, n: int, k: int) -> dict[str, float]:
    scales = 4 * (m * math.ceil(k / 128) + math.ceil(n / 128) * math.ceil(k / 128))
    moved = n * k + m * k + 2 * m * n + scales
    return {"bytes": moved / BYTES_PER_US, "flops": 2 * m * n * k / FLOPS_PER_US}


def measure(weights: Weights, m: int, clock: GraphClock) -> dict[str, Any]:
    calls, reasons = columns(weights, m)
    names = {label: sorted(set(kernel_names(call))) for label, call in calls.items()}
    times = clock.times({label: clock.prepare(call) for label, call in calls.items()})
    layers = len(weights.b)
    return {
        "m": m,
        "n": weights.n,
        "k": weights.k,
        "layers": layers,
        "floors_us": floors_us(m, weights.n, weights.k),
        "why_not": reasons,
        "kernels": {
            label: {**summary([t / layers for t in us]), "names": names[label]}
            for label, us in times.items()
        },
    }


def table(rows: list[dict[str, Any]]) -> Table:
    labels = list(dict.fromkeys(label for row in rows for label in row["kernels"]))
    shown = Table("N, K", "M", "bytes", "flops", *labels, title="us a layer, median")
    for row in rows:
        floor = row["floors_us"]
        cells = [f"{row['kernels'][x]['us']:.2f}" if x in row["kernels"] else "-" for x in labels]
        shape = f"{row['n']}, {row['k']}"
        shown.add_row(
            shape, str(row["m"]), f"{floor['bytes']:.2f}", f"{floor['flops']:.2f}", *cells
        )
    return shown


@torch.no_grad()
def main(
    json_path: JsonPath = None,
    tokens: Annotated[str, typer.Option(help="values of M, by commas")] = TOKENS,
    shapes: Annotated[int, typer.Option(help="how many of the shapes")] = len(SHAPES),
) -> None:
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a CUDA device: the figures are of GPU kernels")
    clock = GraphClock()
    rows: list[dict[str, Any]] = []
    for n, k in track(SHAPES[:shapes], description="shapes"):
        weights = OPERANDS["block_scaled_mm"].weights(n, k)
        rows += [measure(weights, int(m), clock) for m in tokens.split(",")]
        write(json_path, rows=rows)
    Console(width=200).print(table(rows))


if __name__ == "__main__":
    typer.run(main)
