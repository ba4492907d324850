"""Triton compiles each kernel for GPUs that no test machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOAD, TRIGGER, WAIT = "ld.global", "griddepcontrol.launch_dependents", "griddepcontrol.wait"
# Of each kernel with PDL what stands before its wait: the trigger, and loads of the weight.
BEFORE_WAIT = {
    # 7 steps of 8 warps: of 16 rows of 128 bytes, a thread of a warp loads 4 times 16 bytes.
    "block_scaled_mm_small_m": [LOAD] * 7 * 4 + [TRIGGER],
    # 8192 elements: a thread of 32 warps loads 16 bytes, one of 8 warps 4 times as many.
    "rms_norm_triton": [TRIGGER, LOAD],
    "attn_residual_triton": [TRIGGER] + [LOAD] * 3,  # the query in float32: 2
    "rms_norm_quantize_fp8_triton": [TRIGGER] + [LOAD] * 4,
    # 2 columns of 1024 numbers in 7 steps: a thread of 4 warps loads 16 bytes of a row.
    "router m=1": [TRIGGER] + [LOAD] * 14,
    "router m=8": [TRIGGER] + [LOAD] * 7,  # 1 column
    "router m=1 fp32": [TRIGGER] + [LOAD] * 28,
    # 4 columns of 2048 numbers in 4 steps, and the norm's weight.
    "rms_norm_router_triton": [LOAD] * (4 * 4 + 4) + [TRIGGER],
    # By call. The bias of 256 experts is 8 numbers a thread of the one warp, 4 a load.
    "choice": [TRIGGER],
    "choice of groups": [TRIGGER, LOAD, LOAD],
}
SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.slow
def test_for_ampere_ada_and_hopper(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 3 * 42 - 4
    assert [x for x in made if x["spilled"]] == []
    for x in made:
        assert_order(x)
        if "small_m_triton" in x["kernel"] or x["kernel"] == "rms_norm_router_triton":
            assert x["mma"] == [], x  # dot products
            continue
        if x["call"] in ("norm", "sum", "mixture", "groups", "idle", "choice", "choice of groups"):
            continue  # no product
        if x["call"] == "router":
            assert "bf16.bf16" in x["mma"][0], x
            continue
        if x["kernel"] == "router_gemm_triton":
            assert x["mma"] == [], x  # float32 is no matter for tensor cores: they round it to TF32
            continue
        few_rows = x["kernel"] == "block_scaled_mm_small_m" or x["call"].split()[0] in (
            "m=1",
            "m=16",
        )
        if x["arch"] == 90 and not few_rows:
            [mma] = x["mma"]
            assert mma.startswith("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"), x
        elif x["arch"] == 89 and x["kernel"] != "block_scaled_mm_small_m":
            assert x["mma"] == ["mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"], x
        else:  # decoded to float16, in which every e4m3 value is exact
            assert x["mma"] == ["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"], x


def assert_order(made: dict[str, Any]) -> None:
    """Before its PDL wait a kernel loads its weight alone, and stores nothing."""
    order = made["order"]
    before = BEFORE_WAIT.get(made["kernel"], BEFORE_WAIT.get(made["call"]))
    if made["arch"] < 90 or before is None:
        assert TRIGGER not in order, made
        assert WAIT not in order, made
    else:
        assert order[: len(before) + 1] == [*before, WAIT], made
        after = order[len(before) + 1 :]
        assert set(after) == {LOAD, "st.global"}, made  # the activation, and every store
