"""Tokens a second of the demo's decoder at real width, with and without strip_placeholder_fills.

    python benchmarks/bench_decoder.py [--json benchmarks/results/decoder.json]

Four layers of hidden size 4096 with 20 SwiGLU experts in block FP8, one token a step: 40 GEMMs get
a placeholder scale. "torch.compile" is Inductor alone, "without" is compile_ext with
strip_placeholder_fills switched off, "compile_ext" has all passes; each by itself and with CUDA
graphs (mode="reduce-overhead"). The calls of a round are timed in turn. Logits are compared with
eager's; "error" is of the largest logit. Without a CUDA device nothing is timed, and the decoder is
a small one.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import typer
from measuring import DEVICE, JsonPath, kernel_names, write
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compile_ext.demo.decoder import Config, Decoder
from compile_ext.tune.timing import Call, in_turn, summary

PASS = "strip_placeholder_fills"
WAYS: dict[str, dict[str, Any]] = {
    "torch.compile": {"backend": "inductor"},
    "without": {"backend": "compile_ext", "options": {"compile_ext.disable": [PASS]}},
    "compile_ext": {"backend": "compile_ext"},
}
WIDE = Config(
    vocab=2048,  # the head gives float32 and runs on the reference: kept small
    hidden=4096, layers=4, heads=32, kv_heads=8, head_dim=128, ffn=1536, experts=9, max_tokens=64,
)  # fmt: skip
SMALL = Config(layers=2, vocab=512)
ROUNDS = 20
# Of the largest logit. Inductor keeps float32 where eager rounds to bfloat16, and a byte of FP8
# more or less is 6 %: 0.05 seen between torch.compile and eager.
TOLERANCE = 0.15


def with_graphs(how: dict[str, Any]) -> dict[str, Any]:
    """torch.compile takes a mode or options: the mode of what has options is one of them."""
    if "options" not in how:
        return {**how, "mode": "reduce-overhead"}
    return {**how, "options": {**how["options"], "compile_ext.mode": "reduce-overhead"}}


def measure(
    model: Decoder, inputs: tuple[Tensor, Tensor], ways: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    torch._dynamo.reset()
    want = model(*inputs).float()
    calls: dict[str, Call] = {}
    rows: dict[str, Any] = {}
    for name, how in ways.items():
        compiled = torch.compile(model, fullgraph=True, **how)
        calls[name] = lambda compiled=compiled: compiled(*inputs)
        for _ in range(3):
            got = calls[name]().float().clone()
        error = float((got - want).abs().max() / want.abs().max())
        assert error < TOLERANCE, (name, error)
        rows[name] = {"error": error}
    if DEVICE == "cpu":
        return rows
    for name, times in in_turn(calls, ROUNDS, 5).items():
        kernels = Counter(kernel_names(calls[name]))
        rows[name] |= {**summary(times), "kernels": kernels.total(), "names": dict(kernels)}
    return rows


def main(json_path: JsonPath = None) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        model = Decoder(WIDE if DEVICE == "cuda" else SMALL).to(DEVICE)
        token, position = (torch.tensor([i], device=DEVICE) for i in (7, 0))
        rows = measure(model, (token, position), WAYS)
        if DEVICE == "cuda":
            graphs = {f"{name} (CUDA graphs)": with_graphs(how) for name, how in WAYS.items()}
            rows |= measure(model, (token, position), graphs)
    table = Table(title="one token" if DEVICE == "cuda" else "no CUDA device: nothing was timed")
    for column in ("way", "error", "tokens/s", "us", "quartiles", "kernels"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row['error']:.3f}", *(figures(row) if DEVICE == "cuda" else ()))
    Console(width=150).print(table)
    write(json_path, rows=rows)


def figures(row: dict[str, Any]) -> list[str]:
    quartiles = f"{row['quartile_low_us']:.0f} .. {row['quartile_high_us']:.0f}"
    return [f"{1e6 / row['us']:.1f}", f"{row['us']:.0f}", quartiles, str(row["kernels"])]


if __name__ == "__main__":
    typer.run(main)
