"""Configurations of the router's kernels in CuTe DSL, one by one.

    python benchmarks/sweep_router.py --compile-only       without a GPU: fills the kernels' cache
    python benchmarks/sweep_router.py [--json benchmarks/results/router_sweep.json] [--ship]

With ``--ship`` the fastest are written to ``ops/router_cute.json``, which the kernels read. Norm
and router of 40 layers in one CUDA graph, the L2 flushed before each replay, each result checked
against float64 first, medians of replays in turn. Each call fetches its weight before its PDL
wait.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import torch
import torch.multiprocessing as mp
import typer
from measuring import JsonPath, about, write
from rich.console import Console
from rich.table import Table
from router_layers import EPS, ERROR, SHAPES, Layers, kernel
from torch import Tensor

from compile_ext.ops import compiled_cache, rms_norm_router_cute, router_gemm_cute
from compile_ext.ops.cute_kernel import CuteKernel
from compile_ext.ops.router_cute_parameters import MEASURED, DotParameters, MmaParameters, Split
from compile_ext.tune.measure import GraphClock
from compile_ext.tune.timing import summary

TOKENS = (2, 4, 8, 16, 32, 64, 128)
HOPPER = (9, 0)
Parameters = DotParameters | MmaParameters


def splits(n: int, k: int) -> Iterator[Split]:
    """Of one token: by clusters of 1, 2 and 4, near 128 CTAs, one to three vectors a thread."""
    for cluster, more in ((1, 0), (1, 1), (2, 0), (4, 0)):
        columns = math.ceil(math.ceil(n * cluster / 128) / cluster) * cluster + more
        for vectors in (1, 2, 3):
            share = math.ceil(k / 8 / cluster)
            threads = math.ceil(math.ceil(share / vectors) / 32) * 32
            for widens in (False, True):
                held = columns * vectors * (8 if widens else 4)
                fit = 65536 // (threads * (math.ceil((held + 36) / 8) * 8))
                if 96 <= threads <= 960 and held <= 112 and not (vectors == 3 and share % 3):
                    for blocks in {max(1, min(8, fit)), 2 if fit == 1 and held > 48 else 0} - {0}:
                        yield Split(columns, cluster, vectors, widens, blocks)


def of_one_token(n: int, k: int, has_norm: bool) -> list[DotParameters]:
    return [DotParameters(k, x, None, has_norm, has_norm) for x in splits(n, k)]


def of_few_tokens(m: int, n: int, k: int) -> list[MmaParameters]:
    found = []
    for cluster in (2, 4, 8):
        ctas = math.ceil(n / 16) * cluster
        for warps in (2, 4, 8, 16):
            for tokens in (8, 16, 32):
                made = MmaParameters(k, cluster, warps, tokens)
                fits = made.pieces * (8 if tokens < 32 else 16) <= 112
                wasted = made.pieces * warps - made.share > made.share / 3
                is_like_m = tokens <= max(8, m) <= 8 * tokens
                fills = 40 <= ctas <= 264 or (cluster == 8 and ctas < 40)
                if fits and not wasted and is_like_m and fills:
                    found.append(made)
    return found


def candidates(n: int, k: int) -> dict[tuple[str, int], list[Any]]:
    """By kernel and M."""
    found: dict[tuple[str, int], list[Any]] = {
        ("norm", 1): of_one_token(n, k, True),
        ("dot", 1): of_one_token(n, k, False),
    }
    for m in TOKENS:
        if m * n <= router_gemm_cute.MAX_LOGITS:
            found["mma", m] = of_few_tokens(m, n, k)
    return found


def kernel_of(p: Parameters) -> CuteKernel:
    return router_gemm_cute.DOT if isinstance(p, DotParameters) else router_gemm_cute.MMA


def is_compiled(p: Parameters) -> bool:
    return compiled_cache.find(kernel_of(p).key(p, HOPPER)) is not None


def compile_one(p: Parameters) -> str | None:
    try:
        kernel_of(p).prepare(p, HOPPER)
    except Exception as error:  # in a worker: the parent says it
        return f"{p}: {error}"[:300]
    return None


def compile_all(wanted: list[Parameters]) -> None:
    missing = [p for p in dict.fromkeys(wanted) if not is_compiled(p)]
    with ProcessPoolExecutor(os.cpu_count(), mp.get_context("spawn")) as pool:
        for message in pool.map(compile_one, missing, chunksize=4):
            if message:
                print(message)


def measure(layers: Layers, name: str, m: int, wanted: list[Any], clock: GraphClock) -> list[Any]:
    layers.tokens(m)
    rms_norm = kernel("rms_norm", "triton")
    replays = {}
    for p in wanted:
        if not is_compiled(p):
            continue  # it did not compile

        def fused(x: Tensor, norm: Tensor, b: Tensor, p: Any = p) -> tuple[Tensor, Tensor]:
            args = x, None, norm, EPS, False, b, None
            y, _, logits = rms_norm_router_cute.run(*args, prefetch=True, split=p.split)
            return y, logits

        def apart(x: Tensor, norm: Tensor, b: Tensor, p: Any = p) -> tuple[Tensor, Tensor]:
            y = rms_norm.launch((x, norm, EPS, False), prefetch=True)
            assert isinstance(y, Tensor)
            return y, router_gemm_cute.run(y, b, None, prefetch=True, chosen=p)

        call = layers.all_layers(fused if name == "norm" else apart)
        call()
        error = layers.error(name == "norm")
        assert error <= ERROR, f"{p}: {error:.2e}"
        replays[p] = clock.prepare(call)
    times = clock.times(replays)
    rows = [(summary([x / len(layers.b) for x in us]), p) for p, us in times.items()]
    return sorted(rows, key=lambda row: row[0]["us"])


def config(p: Parameters) -> list[int]:
    found = p.split if isinstance(p, DotParameters) else (p.cluster, p.warps, p.tokens)
    return [int(x) for x in found]


def shipped(rows: list[dict[str, Any]]) -> str:
    """What the kernels read: a range of M ends at each measured M."""
    lines = []
    for row in rows:
        kept = {x: row[x] for x in ("kernel", "n", "k")}
        best = row["configs"][0]["config"]
        lines.append(json.dumps({**kept, "last_m": row["m"], "config": best}))
    text = ",\n  ".join(lines)
    head = json.dumps(about(), indent=1)
    return head.removesuffix("\n}") + f',\n "rows": [\n  {text}\n ]\n}}\n'


@torch.no_grad()
def main(
    json_path: JsonPath = None,
    ship: Annotated[bool, typer.Option("--ship", help="write what the kernels read")] = False,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="measure nothing")] = False,
) -> None:
    compile_all([p for n, k in SHAPES for x in candidates(n, k).values() for p in x])
    if compile_only:
        return
    clock = GraphClock()
    table = Table("kernel", "N, K", "M", "config: us", title="us a layer with its norm, median")
    rows = []
    for n, k in SHAPES:
        layers = Layers.of(n, k)
        for (name, m), wanted in candidates(n, k).items():
            found = measure(layers, name, m, wanted, clock)
            configs = [{"config": config(p), **times} for times, p in found]
            rows.append({"kernel": name, "n": n, "k": k, "m": m, "configs": configs})
            best = "; ".join(f"{x['config']}: {x['us']:.2f}" for x in configs[:3])
            table.add_row(name, f"{n}, {k}", str(m), best)
    Console(width=120).print(table)
    if ship:
        MEASURED.write_text(shipped(rows), encoding="utf-8")
    write(json_path, rows=rows)


if __name__ == "__main__":
    typer.run(main)
