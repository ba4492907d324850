"""Configurations of the kernel for few tokens, ``ops/block_scaled_mm_small_m.py``, one by one.

    python benchmarks/sweep_small_m.py [--json benchmarks/results/small_m.json] [--ship]

With ``--ship`` the fastest are written to ``ops/block_scaled_mm_small_m.json``, which ``configure``
reads. As in bench_fp8_gemm.py: layers with different
weights in one CUDA graph, the L2 flushed before each replay, each result checked first, medians of
replays in turn. Each call fetches its weight before its PDL wait.
"""

from __future__ import annotations

import json
import math
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import torch
import torch.multiprocessing as mp
import typer
from bench_fp8_gemm import floors_us
from measuring import JsonPath, about, write
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compile_ext.ops import dequantize_fp8_blocks, dequantize_fp8_groups
from compile_ext.ops.block_scaled_mm_small_m import MEASURED, Config, run
from compile_ext.ops.block_scaled_mm_spec import FEW_COLUMNS, MAX_TOKENS
from compile_ext.tune.measure import RELATIVE_ERROR, GraphClock, relative_error
from compile_ext.tune.operands import OPERANDS, SHAPES, Weights
from compile_ext.tune.timing import summary

TOKENS = (1, 8, 16, 32, 64)
CUTS = (  # columns, warps, ahead, registers
    (16, 8, 7, None), (16, 8, 4, 128), (16, 8, 3, None), (16, 4, 7, None), (16, 4, 4, 128),
    (16, 4, 3, None), (16, 2, 6, None), (32, 8, 3, None), (32, 8, 2, None), (32, 4, 3, None),
    (32, 4, 2, None), (32, 2, 3, None), (32, 2, 2, None),
)  # fmt: skip
Job = tuple[int, int, int, Config]


def configs(m: int, k: int) -> list[Config]:
    """Each cut with rounds of one step, and of as many as are loaded ahead; once where none are."""
    tokens = (8,) if m <= 8 else (16,) if m <= 16 else (16, 32)
    found = []
    for t in tokens:
        for columns, warps, ahead, registers in CUTS:
            steps = math.ceil(math.ceil(k / 128) / warps)
            laters = {1, ahead} if steps > ahead else {1}
            found += [Config(columns, t, warps, ahead, x, registers) for x in sorted(laters)]
    return found


def compile_one(job: Job) -> str | None:
    m, n, k, config = job
    operands = OPERANDS["block_scaled_mm"]
    b = torch.zeros(n, k, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.ones(operands.scale_shape(n, k), device="cuda")
    [args] = operands.calls(Weights(n, k, [b], [scale]), m, torch.bfloat16)
    try:
        run(*args, prefetch=True, config=config)
        torch.cuda.synchronize()
    except Exception as error:  # in a worker: the parent says it
        return f"{job}: {type(error).__name__}: {error}"[:300]
    return None


def measure(weights: Weights, m: int, clock: GraphClock) -> dict[str, Any]:
    layers = OPERANDS["block_scaled_mm"].calls(weights, m, torch.bfloat16)
    a, b, scale_a, scale_b, *_ = layers[0]
    want = dequantize_fp8_groups(a, scale_a) @ dequantize_fp8_blocks(b, scale_b).t()
    replays = {}
    for config in configs(m, weights.k):

        def call(config: Config = config) -> list[Tensor]:
            return [run(*args, prefetch=True, config=config) for args in layers]

        error = relative_error(run(*layers[0], prefetch=True, config=config), want)
        assert error <= RELATIVE_ERROR, f"{config} at {m, weights.n, weights.k}: {error:.2e}"
        replays[config] = clock.prepare(call)
    rows = [
        {**config._asdict(), **summary([x / len(layers) for x in us])}
        for config, us in clock.times(replays).items()
    ]
    rows.sort(key=lambda row: row["us"])
    shape = {"m": m, "n": weights.n, "k": weights.k}
    return {**shape, "floors_us": floors_us(m, weights.n, weights.k), "configs": rows}


def shipped(rows: list[dict[str, Any]]) -> str:
    """The rows that ``configure`` reads: a range ends at each measured M."""
    lines = []
    for row in rows:
        best = row["configs"][0]
        kept = {"n": row["n"], "k": row["k"], "last_m": row["m"]}
        lines.append(json.dumps({**kept, "config": [best[x] for x in Config._fields]}))
    text = ",\n  ".join(lines)
    head = json.dumps(about(), indent=1)
    return head.removesuffix("\n}") + f',\n "rows": [\n  {text}\n ]\n}}\n'


@torch.no_grad()
def main(
    json_path: JsonPath = None,
    ship: Annotated[bool, typer.Option("--ship", help="write what the kernel reads")] = False,
) -> None:
    shapes = [(m, n, k) for n, k in SHAPES for m in TOKENS if m <= MAX_TOKENS or n <= FEW_COLUMNS]
    jobs = [(*shape, config) for shape in shapes for config in configs(shape[0], shape[2])]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp.get_context("spawn")) as pool:
        for message in pool.map(compile_one, jobs):
            if message:
                print(message)
    clock = GraphClock()
    table = Table("N, K", "M", "floor", ", ".join(Config._fields), "us")
    rows = []
    for n, k in SHAPES:
        weights = OPERANDS["block_scaled_mm"].weights(n, k)
        for m in [m for m, *shape in shapes if shape == [n, k]]:
            rows.append(measure(weights, m, clock))
            for best in rows[-1]["configs"][:4]:
                cut = ", ".join(str(best[x]) for x in Config._fields)
                floor = f"{max(rows[-1]['floors_us'].values()):.2f}"
                table.add_row(f"{n}, {k}", str(m), floor, cut, f"{best['us']:.2f}")
    Console(width=100).print(table)
    if ship:
        MEASURED.write_text(shipped(rows), encoding="utf-8")
    write(json_path, rows=rows)


if __name__ == "__main__":
    typer.run(main)
