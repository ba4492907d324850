"""Plan random sites for an H200, and launch their calls at each number of tokens: strides, views,
layouts of scales, ranges of M, pinned kernels. Run by ``test_planning.py`` in a process of its own,
without Triton's interpreter. Prints one JSON object."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from call_sites import BF16, F32, FP8, H200, M, dense, site

from compile_ext.manifest import Manifest, ManifestSite
from compile_ext.ops import (
    deep_gemm_compiler,
    deep_gemm_support,
    grouped_block_scaled_mm_deep_gemm,
    launches,
)
from compile_ext.ops.call_site import CallSite, SizeValue, TensorForm
from compile_ext.ops.define import definition_of, own_arguments
from compile_ext.planning import plan

SEEDS = 36
HIGH = 700  # beyond where each M is asked, through several tiles
COLUMNS = "4*((M + 3)//4)"


def random_site(seed: int) -> CallSite:
    r = random.Random(seed)
    n, k = r.choice([16, 100, 128, 576]), r.choice([128, 136, 512, 7168])
    groups, rows = -(-k // 128), -(-n // 128)
    m = r.choice([(1, None), (2, None), (2, 64), (300, 500), (17, 17)])
    scale = r.choice([(1, COLUMNS), (groups, 1), (1, M)])
    stride, offset = r.choice([(k, 0), (k + 16, 0), (k + 1, 1), (2 * k, 16)])
    a = TensorForm(FP8, (M, k), (stride, 1), offset)
    x = TensorForm(BF16, (M, k), (stride, 1), offset)
    bias = r.choice([None, dense(BF16, n), TensorForm(F32, (n,), (2,))])
    b, scale_b = dense(FP8, n, k), dense(F32, rows, groups)
    experts, scale_experts = dense(FP8, 4, n, k), dense(F32, 4, rows, groups)
    pinned, prefetch = r.choice([None, None, "batch_invariant"]), r.random() < 0.5
    of_a = TensorForm(F32, (M, groups), scale)
    forms: dict[str, dict[str, Any]] = {
        "block_scaled_mm": {
            "a": a, "b": b, "scale_a": of_a, "scale_b": scale_b, "bias": bias,
            "out_dtype": torch.bfloat16, "prefetch": prefetch,
        },
        "scaled_mm": {
            "a": a, "b": b, "scale_a": dense(F32, M, 1), "scale_b": dense(F32, n, 1),
            "bias": bias, "out_dtype": torch.bfloat16,
        },
        "router_gemm": {"a": x, "b": dense(BF16, n, k), "bias": bias, "prefetch": prefetch},
        "grouped_block_scaled_mm": {
            "a": a, "b": experts, "scale_a": of_a, "scale_b": scale_experts,
            "m_indices": dense("int32", M), "out_dtype": torch.bfloat16,
        },
        "grouped_block_scaled_mm_masked": {
            "a": TensorForm(FP8, (4, M, k), (f"{k}*M", k, 1)), "b": experts,
            "scale_a": TensorForm(F32, (4, M, groups), (f"{groups}*M", groups, 1)),
            "scale_b": scale_experts, "masked_m": dense("int32", 4),
            "expected_m": r.choice([5, SizeValue(M)]), "out_dtype": torch.bfloat16,
        },
        "fp8_bmm": {
            "a": dense(FP8, M, 4, k), "b": experts, "scale_a": dense(F32, M, 4, groups),
            "scale_b": scale_experts, "out_dtype": torch.bfloat16,
        },
    }  # fmt: skip
    op = list(forms)[seed % len(forms)]
    found = site(op, m, n, k, **forms[op])
    arguments = tuple((y, pinned if y == "pinned" else v) for y, v in found.arguments)
    return CallSite(found.op, found.m, arguments, found.n, found.k)


def launched(s: CallSite) -> Iterator[tuple[int, str, set[str]]]:
    """M, the kernel that the op takes, and the keys of what that launches."""
    definition = definition_of(s.overload)
    assert definition is not None
    with launches.recording(H200) as noted:
        fixed = s.fixed("meta")
        for m in range(s.m[0], min(s.m[1] or HIGH, HIGH) + 1):
            arguments = s.make(m, "meta", fixed)
            own = own_arguments(arguments)
            kernel, _ = definition.kernel_for(*own, pinned=arguments["pinned"])
            noted.clear()
            if kernel.compiles:
                kernel.launch(own, prefetch=arguments.get("prefetch", False))
            yield m, kernel.name, {x.key for x in noted}


def compared(s: CallSite) -> dict[str, Any]:
    found = plan(Manifest((ManifestSite(s, ("layer",)),)), H200, HIGH)
    planned = {x.key for x in found.units}
    calls = list(launched(s))
    needed = set().union(*(keys for _, _, keys in calls))
    return {
        "op": s.op,
        "units": len(planned),
        "kernels": sorted({name for _, name, _ in calls}),
        "missing": [m for m, _, keys in calls if keys - planned],
        "idle": [x.calls[0].m for x in found.units if x.key not in needed],
        "not_covered": [x.reason for x in found.not_covered],
        "arguments": repr(s),
    }


if __name__ == "__main__":
    # DeepGEMM as if it were here: what it compiles is foretold without it.
    library: Any = deep_gemm_support
    library.why_not = grouped_block_scaled_mm_deep_gemm._why_not_rows = lambda: None
    compiler: Any = deep_gemm_compiler
    compiler._library = lambda: {"deep_gemm": "0.1.5"}
    compiler._compiled_sizes = lambda function, n, k: f"n={n}, k={k}"
    print(json.dumps([compared(random_site(seed)) for seed in range(SEEDS)]))
