"""Norm and router of a mixture-of-experts layer: every kernel, what torch does, and the floor.

    python benchmarks/bench_router_gemm.py [--json benchmarks/results/router_gemm.json] [--tokens 1]

Norm and router of 40 layers with as many weights in one CUDA graph; a layer's norm reads what the
layer before it normed. Before each replay 512 MB are read, outside of the timed region, so that no
weight is left in the L2 by luck. A figure is the median of a layer, replays in turn. Each result is
checked against float64 first, and each row carries the kernels' names from the profiler. Kernels
that can fetch their weight before their PDL wait, as all calls of a model but the first do.

    torch.compile   norm and ``F.linear(y, b).float()`` by Inductor
    linear, mm      the op rms_norm, then ``F.linear(y, b).float()``, ``torch.mm(out_dtype=)``
    triton, cute    rms_norm, then the kernel of router_gemm by that name; "no pdl": each kernel
                    starts when the one in front has ended
    fused ...       rms_norm_router, one launch (M == 1)
    + choice        fused cute, then router_topk (softmax, the best 8, renormalized)
    with choice     rms_norm_router_topk, one launch
    op              rms_norm, then what router_gemm chooses
    vllm, ...       rms_norm, then theirs, where they can be imported (``router_peers.py``)
    bytes           weight, activations and logits once, at 4.3 TB/s (an H200's copy)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from measuring import JsonPath, kernel_names, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from router_layers import EPS, ERROR, SHAPES, Layers, kernel
from router_peers import peers
from torch import Tensor

from compile_ext.ops.define import Kernel, definition_of
from compile_ext.ops.router_topk import router_topk_ref
from compile_ext.tune.measure import GraphClock
from compile_ext.tune.timing import summary

TOKENS = "1,2,3,4,8,16,32,64,128"
BYTES_PER_US = 4.3e6
# Of cuBLAS, whose tensor cores cut off what they add to a sum over all of K: up to 2.4e-6 seen.
CUBLAS_ERROR = 1e-5
# F.linear rounds its logits to bfloat16, before which a logit is at most sum |x| |w|.
ROUNDED_ERROR = 2.0**-8
NO_LOGITS = math.inf  # it keeps them to itself: ``assert_choice`` looks at its choice
CHOICE = None, 8, "softmax", 1, 1, 0.0, True, 1.0
Layer = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rms_norm(x: Tensor, norm: Tensor, pdl: bool = True) -> Tensor:
    y = kernel("rms_norm", "triton").launch((x, norm, EPS, False), prefetch=pdl)
    assert isinstance(y, Tensor)
    return y


def spelled(x: Tensor, norm: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.rms_norm(x, x.shape[-1:], norm, EPS)
    return y, F.linear(y, b).float()


def behind_norm(
    x: Tensor, norm: Tensor, b: Tensor, router: Callable[[Tensor, Tensor], Any], pdl: bool = True
) -> tuple[Tensor, Tensor]:
    y = rms_norm(x, norm, pdl)
    return y, router(y, b)


def fused(x: Tensor, norm: Tensor, b: Tensor, by: Kernel) -> tuple[Tensor, Tensor]:
    y, _, logits = by.launch((x, None, norm, EPS, False, b, None), prefetch=True)
    return y, logits


def then_choice(x: Tensor, norm: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y, logits = fused(x, norm, b, kernel("rms_norm_router", "cute"))
    kernel("router_topk", "triton").launch((logits, *CHOICE), prefetch=True)
    return y, logits


def with_choice(x: Tensor, norm: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    args = x, None, norm, EPS, False, b, None, *CHOICE
    y, _, _, ids = kernel("rms_norm_router_topk", "triton").launch(args, prefetch=True)
    return y, ids


def assert_choice(x: Tensor, norm: Tensor, b: Tensor) -> None:
    """One launch chooses what router_topk's specification chooses of the same logits."""
    _, logits = fused(x, norm, b, kernel("rms_norm_router", "triton"))
    args = x, None, norm, EPS, False, b, None, *CHOICE
    _, _, weights, ids = kernel("rms_norm_router_topk", "triton").launch(args, prefetch=False)
    want_weights, want_ids = router_topk_ref(logits, *CHOICE)
    assert torch.equal(ids, want_ids)
    assert torch.allclose(weights, want_weights, rtol=1e-6, atol=0)


def columns(m: int, b: Tensor) -> Iterator[tuple[str, Layer, float]]:
    """Each column: its name, a layer of it, and the error that it may have."""
    y = torch.empty(m, b.shape[1], device="cuda", dtype=torch.bfloat16)
    yield "torch.compile", torch.compile(spelled, dynamic=m > 1), ROUNDED_ERROR
    linear = functools.partial(behind_norm, router=lambda y, b: F.linear(y, b).float())
    yield "linear", linear, ROUNDED_ERROR
    mm = functools.partial(
        behind_norm, router=lambda y, b: torch.mm(y, b.t(), out_dtype=torch.float32)
    )
    yield "mm", mm, CUBLAS_ERROR
    for name, router in peers(m, *b.shape):
        yield name, functools.partial(behind_norm, router=router), ERROR
    for name in ("triton_small_m", "cute"):
        by = kernel("router_gemm", name)
        if by.why_not(y, b, None) is None:
            for label, pdl in ((name, True), (f"{name}, no pdl", False)):

                def router(y: Tensor, b: Tensor, by: Kernel = by, pdl: bool = pdl) -> Any:
                    return by.launch((y, b, None), prefetch=pdl)

                yield label, functools.partial(behind_norm, router=router, pdl=pdl), ERROR
    if m == 1:
        for name in ("triton", "cute"):
            by = kernel("rms_norm_router", name)
            if by.why_not(y, None, b[0], EPS, False, b, None) is None:
                yield f"fused {name}", functools.partial(fused, by=by), ERROR
        yield "fused + choice", then_choice, ERROR
        yield "fused with choice", with_choice, NO_LOGITS
    definition = definition_of(torch.ops.compile_ext.router_gemm.default)
    assert definition is not None
    chosen = definition.kernel_for(y, b, None)[0]

    def op(y: Tensor, b: Tensor) -> Any:
        return chosen.launch((y, b, None), prefetch=True)

    error = CUBLAS_ERROR if chosen.name == "aten" else ERROR
    yield "op", functools.partial(behind_norm, router=op), error


def measure(layers: Layers, m: int, clock: GraphClock) -> dict[str, Any]:
    layers.tokens(m)
    replays, found = {}, {}
    for name, layer, allowed in columns(m, layers.b[0]):
        call = layers.all_layers(layer)
        call()
        if allowed is NO_LOGITS:
            error = 0.0
            assert_choice(layers.x, layers.norms[0], layers.b[0])
        else:
            error = layers.error(name.startswith("fused"))
        assert error <= allowed, f"{name} at M = {m}, {tuple(layers.b.shape)}: {error:.2e}"
        found[name] = {"error": error, "names": sorted(set(kernel_names(call)))}
        replays[name] = clock.prepare(call)
    times = clock.times(replays)
    _, n, k = layers.b.shape
    moved = 2 * n * k + 4 * m * k + 4 * m * n
    for name, us in times.items():
        found[name].update(summary([x / len(layers.b) for x in us]))
    return {"m": m, "n": n, "k": k, "floor_us": moved / BYTES_PER_US, "columns": found}


def table(rows: list[dict[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["columns"]))
    shown = Table("K, N", "M", "bytes", *names, "error", title="us a layer, median")
    for row in rows:
        cells = [f"{row['columns'][x]['us']:.2f}" if x in row["columns"] else "-" for x in names]
        ours = [x["error"] for name, x in row["columns"].items() if name.split(",")[0] in OURS]
        worst = f"{max(ours, default=math.nan):.1e}"
        shape = f"{row['k']}, {row['n']}"
        shown.add_row(shape, str(row["m"]), f"{row['floor_us']:.2f}", *cells, worst)
    return shown


OURS = ("triton_small_m", "cute", "fused triton", "fused cute")


@torch.no_grad()
def main(
    json_path: JsonPath = None,
    tokens: Annotated[str, typer.Option(help="values of M, by commas")] = TOKENS,
) -> None:
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a CUDA device: the figures are of GPU kernels")
    clock = GraphClock()
    rows: list[dict[str, Any]] = []
    for n, k in track(SHAPES, description="shapes"):
        torch._dynamo.reset()
        layers = Layers.of(n, k)
        rows += [measure(layers, int(m), clock) for m in tokens.split(",")]
        write(json_path, rows=rows)
    Console(width=200).print(table(rows))


if __name__ == "__main__":
    typer.run(main)
