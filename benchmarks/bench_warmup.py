"""How long it takes to have every kernel compiled, one after another and by ``compile_ext.warmup``,
and whether a call then compiles anything.

    python benchmarks/bench_warmup.py [--json benchmarks/results/warmup.json]

Nine shapes of block-scaled FP8 linears (DeepSeek-V3's, and two of a 31B Gemma), up to 8192 tokens.
Each step is a process of its own; its time begins once torch and the package are imported.

    one by one   cold caches, one process: each unit of the plan by its first call
    warmup       cold caches, 1 rank (three times: the median), 2 and 8 started together on one GPU
    restart      warm caches: until every kernel is loaded and has run once
    sweep        each M of each site under seal("error"); results of random data against float32
    decoder      the demo's decoder: 463 random prompts of 1 to 8192 tokens under seal("error")

Memory is the most that was taken while the step ran, over what was taken before, of the GPU and of
the host. Without a CUDA device there is nothing to measure.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measuring import DEVICE, JsonPath, kernel_names, write
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import compile_ext
from compile_ext.demo.decoder import Config, Decoder
from compile_ext.layers import BlockFp8Linear
from compile_ext.manifest import Manifest
from compile_ext.ops import block_scaled_mm, dequantize_fp8_groups, quantize_fp8_groups
from compile_ext.ops.call_site import run_calls
from compile_ext.ops.device import Target
from compile_ext.ops.quantize import quantize_fp8_blocks
from compile_ext.planning import Plan, plan

SHAPES = [
    (576, 7168), (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168),
    (7168, 2048), (21504, 5376), (5376, 21504),
]  # fmt: skip
MAX_TOKENS = 8192
RANKS = (2, 8)
REPEATS = 3  # of the cold warmup by one rank: hosts differ, and so do runs
PROMPTS = 463
CHECKED_TOKENS = (1, 17, 64, 1000)
# Of the sum of absolute products: both round the result to bfloat16 once (2^-9), and add in
# another order.
TOLERANCE = 2.0**-8
DECODER = Config(
    vocab=2048, hidden=2048, layers=2, heads=16, kv_heads=4, head_dim=128, ffn=1536, experts=4,
    max_tokens=MAX_TOKENS,
)  # fmt: skip
console = Console()


class Linears(nn.Module):
    """One linear of each shape, without weights: on the device ``meta``."""

    def __init__(self) -> None:
        super().__init__()
        shapes = (torch.empty(n, k, device="meta") for n, k in SHAPES)
        self.linears = nn.ModuleList(BlockFp8Linear(x) for x in shapes)

    def forward(self, *xs: Tensor) -> list[Tensor]:
        return [linear(x) for linear, x in zip(self.linears, xs, strict=True)]


def manifest() -> Manifest:
    """Of one token, and of any number from 2 on."""
    model, found = Linears(), Manifest()
    for m in (1, 64, 65):
        torch._dynamo.reset()
        xs = [torch.empty(m, k, dtype=torch.bfloat16, device="meta") for _, k in SHAPES]
        if m > 1:
            for x in xs:
                torch._dynamo.mark_dynamic(x, 0)
        found = found.merge(compile_ext.collect(model, *xs))
    return found


# ---- steps, each in a process of its own ---------------------------------------------------------


def one_by_one(folder: Path) -> dict[str, Any]:
    os.environ.update(
        TRITON_CACHE_DIR=str(folder / "triton"),
        DG_JIT_CACHE_DIR=str(folder / "deep_gemm"),
        COMPILE_EXT_CACHE_DIR=str(folder),
    )
    with watching() as taken:
        start = time.perf_counter()
        found = planned(folder)
        for unit in found.units:
            run_calls(unit.calls, DEVICE)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "units": len(found.units), **kernels_in(folder), **taken}


def warm(folder: Path) -> dict[str, Any]:
    with watching() as taken:
        start = time.perf_counter()
        report = compile_ext.warmup(
            Manifest.load(folder / "manifest.json"),
            max_tokens=MAX_TOKENS,
            cache_dir=folder / "cache",
            progress=False,
        )
        seconds = time.perf_counter() - start
    counts = Counter(x.status for x in report.results)
    failed = [f"{x.unit.kernel}: {x.reason}" for x in report.results if x.status == "failed"]
    return {
        "seconds": seconds,
        "units": len(report.results),
        **{status: counts[status] for status in ("compiled", "cached", "failed", "skipped")},
        "failures": failed[:3],
        **kernels_in(folder / "cache"),
        **taken,
    }


def sweep(folder: Path) -> dict[str, Any]:
    warmed = warm(folder)
    sites = [x for x in planned(folder).sites if x.keys]
    checked = check()
    calls, names = 0, set()
    told: list[compile_ext.CompileEvent] = []
    start = time.perf_counter()
    with compile_ext.seal(told.append), compile_ext.seal("error"):
        for each in sites:
            site = each.site.call
            op, fixed = site.overload, site.fixed(DEVICE)
            high = MAX_TOKENS if site.m[1] is None else site.m[1]
            for m in range(max(1, site.m[0]), high + 1):
                op(**site.make(m, DEVICE, fixed))
                calls += 1
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        for each in sites:
            site = each.site.call
            fixed = site.fixed(DEVICE)
            for low, _, _ in each.kernels:
                arguments = site.make(low, DEVICE, fixed)
                names |= set(kernel_names(lambda a=arguments, s=site: s.overload(**a)))
    gemms = sorted({name.split("<")[0][:60] for name in names if "fill" not in name.lower()})
    counted = {"calls": calls, "compiles": len(told), "units": warmed["units"]}
    return {**counted, "seconds": seconds, "kernels": gemms, "error": checked}


def check() -> float:
    """The largest error of the sweep's kernels on random data, of the sum of absolute products."""
    worst = 0.0
    for n, k in SHAPES:
        b, scale_b = quantize_fp8_blocks(torch.randn(n, k, device=DEVICE))
        rows = scale_b.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        weight = b.float() * rows
        for m in CHECKED_TOKENS:
            a, scale_a = quantize_fp8_groups(torch.randn(m, k, device=DEVICE).bfloat16())
            x = dequantize_fp8_groups(a, scale_a)
            got = block_scaled_mm(a, b, scale_a, scale_b).float()
            magnitude = x.abs() @ weight.abs().t()
            error = ((got - x @ weight.t()).abs() / magnitude).max().item()
            assert error <= TOLERANCE, (n, k, m, error)
            worst = max(worst, error)
    return worst


def decoder(folder: Path) -> dict[str, Any]:
    # TF32 would hide what the kernels do, in what they are compared with.
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Decoder(DECODER).to(DEVICE).eval()
    compiled = torch.compile(model, backend="compile_ext", dynamic=True)

    def inputs(m: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, DECODER.vocab, (m,), device=DEVICE)
        return ids, torch.arange(m, device=DEVICE)

    with torch.no_grad():
        start = time.perf_counter()
        report = compile_ext.warmup(
            compiled,
            max_tokens=MAX_TOKENS,
            batch_sizes=(1, 64),
            inputs=inputs,
            cache_dir=folder / "decoder",
            progress=False,
        )
        warmed = time.perf_counter() - start
        chosen = random.Random(0)
        sizes = [chosen.randint(1, MAX_TOKENS) for _ in range(PROMPTS)]
        told: list[compile_ext.CompileEvent] = []
        start = time.perf_counter()
        with compile_ext.seal(told.append), compile_ext.seal("error"):
            for m in sizes:
                logits = compiled(*inputs(m))
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        finite = bool(logits.isfinite().all())
    counts = Counter(x.status for x in report.results)
    assert finite
    counted = {"prompts": len(sizes), "compiles": len(told), "units": len(report.results)}
    return {**counted, **counts, "seconds": seconds, "warmup_seconds": warmed}


STEPS = {f.__name__: f for f in (one_by_one, warm, sweep, decoder)}


def planned(folder: Path) -> Plan:
    target = Target.here(torch.cuda.current_device())
    return plan(Manifest.load(folder / "manifest.json"), target, MAX_TOKENS)


def kernels_in(folder: Path) -> dict[str, int]:
    """How many kernels lie in each cache."""
    deep_gemm = list(folder.glob("deep_gemm/cache/kernel.*"))
    triton = [x for x in folder.glob("triton/*") if any(x.glob("*.cubin"))]
    return {"deep_gemm": len(deep_gemm), "triton": len(triton)}


@contextmanager
def watching() -> Iterator[dict[str, float]]:
    """The most memory that was taken inside, in GiB, of the GPU and of the host."""
    torch.cuda.init()
    taken: dict[str, float] = {}
    stop = threading.Event()
    free = [_free()]

    def watch() -> None:
        while not stop.wait(0.05):
            free.append(_free())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield taken
    finally:
        stop.set()
        thread.join()
        for i, name in enumerate(("gpu_gib", "host_gib")):
            taken[name] = round((free[0][i] - min(x[i] for x in free)) / 2**30, 2)


def _free() -> tuple[int, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    host = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    return torch.cuda.mem_get_info()[0], host * 1024


# ---- the parent ----------------------------------------------------------------------------------


def run(step: str, folder: Path, ranks: int = 1) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--step", step, "--folder", str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(ranks)]
    found = []
    for process in processes:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{step} failed with {process.returncode}")
        found.append(json.loads(output.splitlines()[-1]))
    return found


def main(
    json_path: JsonPath = None,
    step: Annotated[str | None, typer.Option(help="run one step, in this process")] = None,
    folder: Annotated[Path | None, typer.Option(help="of the caches, for a step")] = None,
) -> None:
    if DEVICE != "cuda":
        raise SystemExit("bench_warmup needs a CUDA device")
    if step is not None and folder is not None:
        print(json.dumps(STEPS[step](folder)))
        return
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        found = manifest()

        def cold(name: str) -> Path:
            folder = base / name
            folder.mkdir()
            found.save(folder / "manifest.json")
            return folder

        def note(name: str, row: dict[str, Any]) -> None:
            rows[name] = row
            console.print(name, row)
            write(json_path, rows=rows)  # a later step may fail

        def warmed(ranks: int, name: str) -> dict[str, Any]:
            each = run("warm", cold(name), ranks)
            # Each kernel by one rank: the sum is what the host has compiled.
            compiled = sum(x["compiled"] for x in each)
            assert compiled == each[0]["units"], "a kernel was compiled twice, or not at all"
            return {**each[0], "compiled": compiled, "seconds": max(x["seconds"] for x in each)}

        note("one by one", run("one_by_one", cold("one"))[0])
        repeats = sorted((warmed(1, f"1-{i}") for i in range(REPEATS)), key=lambda x: x["seconds"])
        each = [x["seconds"] for x in repeats]
        note("warmup, 1 ranks", {**repeats[REPEATS // 2], "each_seconds": each})
        for ranks in RANKS:
            note(f"warmup, {ranks} ranks", warmed(ranks, str(ranks)))
        note("restart", run("warm", base / "1-0")[0])
        note("sweep", run("sweep", base / "1-0")[0])
        note("decoder", run("decoder", base / "1-0")[0])
    show(rows)


def show(rows: dict[str, Any]) -> None:
    ratio = rows["one by one"]["seconds"] / rows["warmup, 1 ranks"]["seconds"]
    title = f"cold: {ratio:.1f} times as fast as one by one"
    table = Table("", "seconds", "compiled", "GPU GiB", "host GiB", title=title)
    for name, row in rows.items():
        kernels = row.get("compiled", row.get("units", ""))
        numbers = kernels, row.get("gpu_gib", ""), row.get("host_gib", "")
        table.add_row(name, f"{row['seconds']:.1f}", *map(str, numbers))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
