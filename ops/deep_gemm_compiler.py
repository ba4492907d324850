"""Compile DeepGEMM's kernels ahead of their first launch: by that launch, on tensors of zeros, in a
process whose cache folder is its own, so that what a call has compiled can be told.

The library compiles where a GPU is, and nowhere else: it asks the device for its architecture.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compile_ext.ops import deep_gemm_config, deep_gemm_support, device
from compile_ext.ops.call_site import Call, run_calls
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.deep_gemm_config import Kind
from compile_ext.ops.device import Target
from compile_ext.ops.installed import release_of
from compile_ext.ops.launches import Launch

log = logging.getLogger(__name__)

KINDS: dict[str, Kind] = {
    "fp8_gemm_nt": "dense",
    "m_grouped_fp8_gemm_nt_contiguous": "contiguous",
    "fp8_m_grouped_gemm_nt_masked": "masked",
    "fp8_einsum": "batched",
}
MAX_TOKENS = 16384  # of a site without a limit, where all its kernels have to be tried
# By block_n; the others take 2.5 to 4.8 s (16 at once on 16 cores, nvcc 13.0).
_SECONDS = {96: 5.5, 160: 9.0, 192: 7.0}
# Environment variables that change what is compiled, and so the library's key.
_FLAGS = (
    "DG_JIT_USE_NVRTC",
    "DG_JIT_CPP_STANDARD",
    "DG_JIT_DEBUG",
    "DG_JIT_WITH_LINEINFO",
    "DG_JIT_PTXAS_VERBOSE",
    "DG_JIT_PTXAS_CHECK",
)


class DeepGemmCompiler:
    """DeepGEMM, whose cache is a folder an entry. Its key has the place where the library is
    installed in it, so an entry does not serve another environment."""

    name = "deep_gemm"
    needs_device = True

    def why_not(self, target: Target) -> str | None:
        if not torch.cuda.is_available():
            return "DeepGEMM compiles only where a GPU is: run the warmup there once"
        here = Target.here(torch.cuda.current_device())
        if here.capability != target.capability:
            return f"DeepGEMM compiles for the GPU that is here ({here.arch}), not {target.arch}"
        return deep_gemm_support.why_not()

    def folder(self) -> Path:
        return deep_gemm_support.entries_folder()

    def compile(self, unit: CompileUnit, target: Target, stage: Path) -> None:
        """Where the library compiles another kernel than was foretold, all that the calls of the
        site can need."""
        # Of this process: the library reads the name once.
        deep_gemm_support.use_cache(stage.parent / "deep_gemm")
        run_calls(unit.calls, "cuda")
        torch.cuda.synchronize()
        foretold = dict(unit.made_from)["tile"]
        found = [tile for x in _made() if (tile := tile_of(x)) is not None]
        if found and foretold not in found:
            log.warning(
                "DeepGEMM has compiled %s where %s was foretold: this release chooses another way"
                " than deep_gemm_config.py; each tile of 64 tokens is tried instead",
                *(found[0], foretold),
            )
            run_calls(_cover(unit.calls[0]), "cuda")
            torch.cuda.synchronize()
        for entry in _made():
            entry.rename(stage / entry.name)

    def arrived(self, entry: Path) -> tuple[str, ...]:
        return ()


DEEP_GEMM = DeepGemmCompiler()


def launches_of(function: str, args: tuple[Any, ...]) -> list[Launch]:
    """The one kernel that a call of DeepGEMM will choose on SM90."""
    target = device.target()
    assert target is not None  # a launch is noted for one
    kind = KINDS[function]
    (a, _), (b, _) = args[1:3] if kind == "batched" else args[:2]
    n, k = b.shape[-2:]
    m = args[4] if kind == "masked" else a.shape[0]
    groups = 1 if kind == "dense" else b.shape[0]
    multiprocessors = _multiprocessors(target)
    counted = groups if kind in ("masked", "batched") else 1
    tile = deep_gemm_config.choose(kind, m, n, k, counted, multiprocessors)
    made_from = (
        *_library().items(),
        ("arch", target.arch),
        ("multiprocessors", str(multiprocessors)),
        ("function", function),
        ("tile", str(tile)),
        ("compiled", _compiled_sizes(function, n, k)),
        ("groups", str(groups)),
    )
    seconds = _SECONDS.get(tile.block_n, 4.0)
    return [Launch(DEEP_GEMM, f"{function} {tile}", made_from, seconds=seconds)]


def _cover(call: Call) -> list[Call]:
    """Calls of a site that reach each kernel that its calls can reach, up to this one's tile."""
    low, high = call.site.m
    last = MAX_TOKENS if high is None else high
    tokens = (*deep_gemm_config.FIRST_OF_TILE, *range(1, last + 1, deep_gemm_config.TILE))
    return [replace(call, m=m) for m in sorted(set(tokens)) if low <= m <= last]


def _made() -> list[Path]:
    """The entries in the cache folder, which is this process's own."""
    return sorted(x for x in deep_gemm_support.entries_folder().glob("*") if x.is_dir())


def _multiprocessors(target: Target) -> int:
    """``deep_gemm.set_num_sms`` of this process, where it was called."""
    library: Any = sys.modules.get("deep_gemm")
    found = getattr(library, "get_num_sms", None)
    return (
        int(found())
        if found is not None and torch.cuda.is_available()
        else (target.multiprocessors)
    )


def _compiled_sizes(function: str, n: int, k: int) -> str:
    """N and K where they are compiled in, as this release does by default; else ""."""
    library = importlib.import_module("deep_gemm")
    asked = inspect.signature(getattr(library, function)).parameters.get("compiled_dims")
    dims = "nk" if asked is None else asked.default
    return ", ".join(f"{name}={size}" for name, size in (("n", n), ("k", k)) if name in dims)


@functools.cache
def _library() -> dict[str, str]:
    """What the library's own key depends on, of this installation."""
    library = importlib.import_module("deep_gemm")
    nvcc = deep_gemm_support.nvcc()
    return {
        "deep_gemm": release_of(deep_gemm_support.PACKAGE),
        "installed": str(Path(str(library.__file__)).parent),
        "nvcc": deep_gemm_support.nvcc_release(nvcc) if nvcc else "",
        "flags": ", ".join(f"{x}={os.environ[x]}" for x in _FLAGS if os.environ.get(x)),
    }


def tile_of(entry: Path) -> str | None:
    """The tile that an entry of the cache was compiled for, which its source names:
    ``..., BLOCK_M, BLOCK_N, BLOCK_K, 3 swizzles, stages, 2 thread counts, multicast, on A, ...``.
    None for another kernel, as that which transposes a scale."""
    source = (entry / "kernel.cu").read_text(encoding="utf-8")
    found = re.search(r"sm90_fp8_gemm_1d2d_impl<([^>]*)>", source)
    if found is None:
        return None
    given = [x.strip() for x in found[1].split(",")]
    block_m, block_n, stages, multicast, on_a = (given[i] for i in (5, 6, 11, 14, 15))
    # On A: one load of a brings it to both CTAs, which lie along N.
    along_n = on_a in ("true", "1")
    cluster = "1x1" if multicast == "1" else "1x2" if along_n else "2x1"
    return f"{block_m}x{block_n}, {stages} stages, cluster {cluster}"
