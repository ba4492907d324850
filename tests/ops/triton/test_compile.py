"""Triton compiles each kernel for GPUs that no test machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert len(made) == 3 * 25
    assert [x for x in made if x["spilled"]] == []
    for x in made:
        if x["call"] in ("norm", "groups", "idle"):
            continue  # no product
        if x["call"] == "router":
            assert "bf16.bf16" in x["mma"][0], x
            continue
        few_rows = x["kernel"] == "block_scaled_mm_small_m" or x["call"].split()[0] in (
            "m=1",
            "m=16",
        )
        if x["arch"] == 90 and not few_rows:
            [mma] = x["mma"]
            assert mma.startswith("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"), x
        elif x["arch"] == 89:
            assert x["mma"] == ["mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"], x
        else:  # decoded to float16, in which every e4m3 value is exact
            assert x["mma"] == ["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"], x
