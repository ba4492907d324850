"""No kernel reads out of bounds, whatever happened to a parameter between calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_FOUND = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "script"),
    [("memcheck", "sanitize"), ("memcheck", "sanitize_router"), ("racecheck", "sanitize_router")],
)
def test_no_access_out_of_bounds_and_no_race(tool: str, script: str) -> None:
    # No skip: without the tool nothing was looked at.
    assert Path(_FOUND).exists(), "install compute-sanitizer, which comes with the CUDA toolkit"
    # How a kernel's parameters end, the driver says by an error: that is none of ours. Racecheck
    # warns of an mbarrier that a thread initialises and arrives at itself, one instruction later.
    options = ["--report-api-errors", "no", "--print-level", "error"]
    command = [_FOUND, "--tool", tool, *options, "--error-exitcode", "9", sys.executable]
    path = str(Path(__file__).with_name(f"{script}.py"))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run([*command, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "clean" in done.stdout
    # memcheck's last line, and racecheck's
    said = done.stdout + done.stderr
    assert "ERROR SUMMARY: 0 errors" in said or "RACECHECK SUMMARY: 0 hazards" in said
