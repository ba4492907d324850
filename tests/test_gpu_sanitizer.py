"""No kernel reads out of bounds, whatever happened to a parameter between calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_FOUND = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


# Each of these kernels: a thread initialises an mbarrier and arrives at it itself, two instructions
# later (SYNCS.EXCH, SYNCS.ARRIVE in the SASS), of which racecheck warns.
_RACE = re.compile(
    r"(\w+): Race reported between Write access at \S*router_(?:mma|dot)_cute_kernel\S*\+0x(\w+)"
    r"[^+]*and Read access at \S*router_(?:mma|dot)_cute_kernel\S*\+0x(\w+)"
)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("script", ["sanitize", "sanitize_router"])
def test_no_access_out_of_bounds(script: str) -> None:
    # The driver says by an error where a kernel's parameters end, which our launcher asks. Calls
    # that fail are exceptions anyway.
    options = ["--error-exitcode", "9"]
    if script == "sanitize_router":
        options += ["--report-api-errors", "no"]
    done = sanitized("memcheck", script, options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_no_race_in_shared_memory() -> None:
    done = sanitized("racecheck", "sanitize_router", [])
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    known = [
        x for x in _RACE.findall(said) if x[0] == "Warning" and int(x[2], 16) - int(x[1], 16) == 32
    ]
    assert "RACECHECK SUMMARY" in said
    assert said.count("Race reported") == len(known), said[-4000:]


def sanitized(tool: str, script: str, options: list[str]) -> subprocess.CompletedProcess[str]:
    # No skip: without the tool nothing was looked at.
    assert Path(_FOUND).exists(), "install compute-sanitizer, which comes with the CUDA toolkit"
    path = str(Path(__file__).with_name(f"{script}.py"))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [_FOUND, "--tool", tool, *options, sys.executable, path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "clean" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    return done
