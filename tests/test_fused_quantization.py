"""A block of a block-scaled FP8 model becomes four kernels: counted in the code that Inductor
generates for a GPU. ``test_gpu_fused_quantization.py`` counts them on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("inductor_kernels.py")


@pytest.mark.parametrize("m", ["1", "8", "256", "dynamic"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_four_kernels(m: str, residual: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), m, str(1 + residual)],
        capture_output=True, text=True, env={**environment, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    norm, gate_up, middle, down = json.loads(done.stdout.splitlines()[-1])
    gemm = "compile_ext.block_scaled_mm" + ("_m1" if m == "1" else "")
    assert norm == f"compile_ext.{'add_' * residual}rms_norm_quantize_fp8"
    assert gate_up == down == gemm
    # silu * mul, the largest of each 128, the scales and the FP8 values: one kernel.
    assert {"silu", "amax", "clamp", "column"} <= set(middle.split("_")), middle
