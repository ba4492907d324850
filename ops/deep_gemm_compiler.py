"""Compile DeepGEMM's kernels ahead of their first launch: by that launch, on tensors of zeros, in a
process whose cache folder is its own, so that what a call has compiled can be told.

The library compiles where a GPU is, and nowhere else: it asks the device for its architecture.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from compile_ext.ops import deep_gemm_config, deep_gemm_support, device
from compile_ext.ops.call_site import run_calls
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target
from compile_ext.ops.errors import KernelUnavailable
from compile_ext.ops.launches import Launch

DENSE = "fp8_gemm_nt"
_ENTRIES = "cache"  # the folder of the entries, in the library's own
# Environment variables that change what is compiled, and so the library's key.
_FLAGS = (
    "DG_JIT_USE_NVRTC",
    "DG_JIT_CPP_STANDARD",
    "DG_JIT_DEBUG",
    "DG_JIT_WITH_LINEINFO",
    "DG_JIT_PTXAS_VERBOSE",
    "DG_JIT_PTXAS_CHECK",
)
# Where DeepGEMM's choice of tile can change: at 16 and 32 tokens, and each 64 (seen of 147,456
# choices on SM90).
FIRST_OF_TILE, TILE = (1, 17, 33), 64


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
        return deep_gemm_support.cache_folder() / _ENTRIES

    def compile(self, unit: CompileUnit, target: Target, stage: Path) -> None:
        """Raises KernelUnavailable where the library compiles another kernel than was foretold."""
        private = stage.parent / "deep_gemm"  # of this process: the library reads its name once
        deep_gemm_support.use_cache(private)
        run_calls(unit.calls, "cuda")
        torch.cuda.synchronize()
        made = sorted(x for x in (private / _ENTRIES).glob("*") if x.is_dir())
        foretold = dict(unit.made_from).get("tile")
        for entry in made:
            entry.rename(stage / entry.name)
            if foretold is not None:
                _check(stage / entry.name, foretold)

    def arrived(self, entry: Path) -> None:
        pass


DEEP_GEMM = DeepGemmCompiler()


def launches_of(function: str, args: tuple[Any, ...]) -> list[Launch]:
    """What a call of DeepGEMM launches: for a dense GEMM on SM90 the one kernel that the library
    will choose; for others one of several, which all calls together show."""
    target = device.target()
    assert target is not None  # a launch is noted for one
    (a, _), (b, _) = args[1:3] if function == "fp8_einsum" else args[:2]
    n, k = b.shape[-2:]
    multiprocessors = _multiprocessors(target)
    made_from = (
        *_library().items(),
        ("arch", target.arch),
        ("multiprocessors", str(multiprocessors)),
        ("function", function),
    )
    if function == DENSE and target.capability == (9, 0):
        tile = deep_gemm_config.choose(a.shape[0], n, k, multiprocessors)
        made_from += (("tile", _text(tile)), ("compiled", _compiled_sizes(n, k)))
        return [Launch(DEEP_GEMM, f"{function} {_text(tile)}", made_from)]
    m = args[4] if function.endswith("masked") else a.shape[0]
    if m not in FIRST_OF_TILE and m % TILE != 1:
        return []
    made_from += (("weight", "x".join(map(str, b.shape))),)
    return [Launch(DEEP_GEMM, function, made_from, each=True)]


def _text(tile: deep_gemm_config.Tile) -> str:
    sizes = f"{tile.block_m}x{tile.block_n}, {tile.stages} stages"
    return f"{sizes}, cluster {tile.cluster_m}x{tile.cluster_n}"


def _multiprocessors(target: Target) -> int:
    """``deep_gemm.set_num_sms`` of this process, where it was called."""
    library: Any = sys.modules.get("deep_gemm")
    found = getattr(library, "get_num_sms", None)
    return (
        int(found())
        if found is not None and torch.cuda.is_available()
        else (target.multiprocessors)
    )


def _compiled_sizes(n: int, k: int) -> str:
    """N and K where they are compiled in, as this release does by default; else ""."""
    library = importlib.import_module("deep_gemm")
    dims = inspect.signature(getattr(library, DENSE)).parameters["compiled_dims"].default
    return ", ".join(f"{name}={size}" for name, size in (("n", n), ("k", k)) if name in dims)


@functools.cache
def _library() -> dict[str, str]:
    """What the library's own key depends on, of this installation."""
    library = importlib.import_module("deep_gemm")
    nvcc = deep_gemm_support.nvcc()
    return {
        "deep_gemm": deep_gemm_support.release(),
        "installed": str(Path(str(library.__file__)).parent),
        "nvcc": deep_gemm_support.nvcc_release(nvcc) if nvcc else "",
        "flags": ", ".join(f"{x}={os.environ[x]}" for x in _FLAGS if os.environ.get(x)),
    }


def _check(entry: Path, foretold: str) -> None:
    """Compare with what was compiled, which names its parameters in its source:
    ``..., BLOCK_M, BLOCK_N, BLOCK_K, 3 swizzles, stages, 2 thread counts, multicast, on A, ...``.

    Raises:
        KernelUnavailable: it is another kernel.
    """
    source = (entry / "kernel.cu").read_text(encoding="utf-8")
    found = re.search(r"sm90_fp8_gemm_1d2d_impl<([^>]*)>", source)
    if found is None:
        return  # another kernel, that transposes a scale
    given = [x.strip() for x in found[1].split(",")]
    block_m, block_n, stages, multicast, on_a = (given[i] for i in (5, 6, 11, 14, 15))
    # The operand that one load brings to both CTAs: a, where they lie along N.
    along_n = multicast != "1" and on_a in ("true", "1")
    cluster = "1x1" if multicast == "1" else "1x2" if along_n else "2x1"
    compiled = f"{block_m}x{block_n}, {stages} stages, cluster {cluster}"
    if compiled != foretold:
        raise KernelUnavailable(
            f"DeepGEMM has compiled {compiled} where {foretold} was foretold: this release chooses"
            " another way than deep_gemm_config.py"
        )
