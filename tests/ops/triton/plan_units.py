"""What each Triton kernel compiles for a site, asked at each number of tokens and at those that a
plan asks at; and that what is compiled ahead is found. Run by ``test_traced_units.py`` in a process
of its own, without the interpreter. Prints one JSON object."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from call_sites import BF16, F32, FP8, H200, M, block_scaled, dense, norm_router, router, site

from compile_ext.ops.call_site import CallSite, TensorForm
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.define import Kernel, definition_of
from compile_ext.ops.triton_compiler import TRITON

HIGH = 700  # beyond where each M is asked, through several tiles


def sites() -> Iterator[CallSite]:
    n, k, groups = 192, 384, 3
    columns = TensorForm(F32, (M, groups), (1, "4*((M + 3)//4)"))
    norm = {"weight": dense(BF16, k), "eps": 1e-6, "round_before_weight": False}
    x, b = dense(BF16, M, k), dense(FP8, n, k)
    every = (1, None)
    yield block_scaled(n, k)
    yield replace(block_scaled(576, 7168), m=(3, 64))
    yield router(100, k, "float32", m=every)
    yield norm_router(100, k)
    yield site("rms_norm", every, None, None, x=x, **norm, prefetch=True)
    yield site("add_rms_norm", every, None, None, x=x, residual=x, **norm, prefetch=False)
    quantizing = {**norm, "use_ue8m0": False, "prefetch": True}
    yield site("rms_norm_quantize_fp8", every, None, None, x=x, **quantizing)
    yield site("add_rms_norm_quantize_fp8", every, None, None, x=x, residual=x, **quantizing)
    yield site(
        "attn_residual", every, None, None, x=x, blocks=dense(BF16, 5, M, k),
        query=dense(BF16, k), key_eps=1e-6, **norm, prefetch=True,
    )  # fmt: skip
    yield site(
        "router_topk", every, None, None, logits=dense(F32, M, 64), bias=None, top_k=8,
        scores="softmax", groups=1, top_groups=1, masked=0.0, renormalize=True, scale=1.0,
    )  # fmt: skip
    yield site(
        "scaled_mm", every, n, k, a=dense(FP8, M, k), b=b, scale_a=dense(F32, M, 1),
        scale_b=dense(F32, 1, n), bias=dense(BF16, n), out_dtype=torch.bfloat16,
    )  # fmt: skip
    yield site(
        "grouped_block_scaled_mm", every, n, k, a=dense(FP8, M, k), b=dense(FP8, 4, n, k),
        scale_a=columns, scale_b=dense(F32, 4, 2, groups), m_indices=dense("int32", M),
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    yield site(
        "fp8_bmm", every, n, k, a=dense(FP8, M, 4, k), b=dense(FP8, 4, n, k),
        scale_a=dense(F32, M, 4, groups), scale_b=dense(F32, 4, 2, groups),
        out_dtype=torch.bfloat16,
    )  # fmt: skip


def triton_kernels(op: CallSite) -> Iterator[Kernel]:
    definition = definition_of(op.overload)
    assert definition is not None
    return (k for k in definition.kernels if "triton" in k.name or k.name == "batch_invariant")


def coverage() -> Iterator[dict[str, Any]]:
    for each in sites():
        low = each.m[0]
        high = HIGH if each.m[1] is None else each.m[1]
        for kernel in triton_kernels(each):
            planned = {x.key for x in kernel.compile_units(each, H200, high)}
            needed: dict[str, int] = {}
            for m in range(low, high + 1):
                for unit in kernel.compile_units(replace(each, m=(m, m)), H200, m):
                    needed.setdefault(unit.key, m)
            missing = sorted(m for key, m in needed.items() if key not in planned)
            idle = len(planned - set(needed))
            name = each.op.removeprefix("compile_ext::").removesuffix(".default")
            yield {"op": name, "kernel": kernel.name, "units": len(planned), "missing": missing,
                   "idle": idle}  # fmt: skip


def compile_ahead(folder: Path) -> dict[str, Any]:
    """Compile a unit, move what it left to another folder, and launch its source there."""
    from triton import compile, knobs

    [unit, *_] = next(
        k for k in triton_kernels(block_scaled(64, 128)) if k.name == "triton"
    ).compile_units(block_scaled(64, 128), H200, 4)
    stage, cache = folder / "stage", folder / "elsewhere" / "cache"
    stage.mkdir()
    cache.mkdir(parents=True)
    TRITON.compile(unit, H200, stage)
    left = sorted(x.name for x in stage.iterdir())
    for entry in stage.iterdir():
        entry.rename(cache / entry.name)
        TRITON.arrived(cache / entry.name)
    hits: list[bool] = []
    knobs.compilation.listener = lambda **said: hits.append(said["cache_hit"])
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    for _ in range(2):
        source, options = again(unit).how
        compile(source, target=gpu(), options=options)
    return {"entries": len(left), "hits": hits, "kept": os.environ["TRITON_CACHE_DIR"]}


def again(unit: CompileUnit) -> CompileUnit:
    import pickle

    from compile_ext.ops.renew import renewed

    sent: CompileUnit = pickle.loads(pickle.dumps(unit))
    assert sent.how is None
    assert sent == unit
    return renewed(sent, H200)


def gpu() -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 90, 32)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ahead = compile_ahead(Path(folder))
    print(json.dumps({"coverage": list(coverage()), "ahead": ahead}))
