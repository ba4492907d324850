"""On a GPU: what a warmup compiles is what calls then need, in this process and the next ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).with_name("warm_on_gpu.py")
# Of the tokens: two experts whose scores lie within rounding, of 4 in one layer of two.
OFF = 0.1


def start(step: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), step, str(folder)]
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=inherited | environment, **pipes)


def result(process: subprocess.Popen[str], damaged: int = 0) -> dict[str, Any]:
    output, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors[-3000:]
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert ["was damaged" in x for x in found["reasons"]] == [True] * damaged
    assert found["off"] <= OFF
    assert found["middle"] <= 0.2  # as it differs with no warmup
    return found


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    certificate = str(folder.parent / "certificate.json")
    command = ["compile-ext", "verify", certificate, "--cache-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_no_call_compiles_and_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = result(start("plain", folder))
    assert set(first["counts"]) == {"compiled"}
    assert first["calls"] == 96
    assert "triton" in first["compilers"]
    again = result(start("plain", folder))
    assert again["counts"] == {"cached": first["counts"]["compiled"]}
    # Packed, and unpacked at another place.
    elsewhere = tmp_path / "other" / "place"
    elsewhere.parent.mkdir()
    folder.rename(elsewhere)
    moved = result(start("plain", elsewhere))
    assert moved["counts"] == again["counts"]
    assert verify(elsewhere).returncode == 0
    # Our Triton kernels begin with a line; Inductor's lie beside them.
    kernels = {"triton": "_*.cubin", "deep_gemm": "*.cubin"}
    damaged = [next((elsewhere / x).rglob(kernel)) for x, kernel in kernels.items()]
    for file in damaged:
        file.write_bytes(file.read_bytes()[:-1])
    refused = verify(elsewhere)
    assert refused.returncode == 1
    mended = result(start("plain", elsewhere), damaged=2)
    assert mended["counts"] == {"cached": again["counts"]["cached"] - 2, "compiled": 2}
    assert verify(elsewhere).returncode == 0


def test_two_ranks_compile_each_kernel_once(tmp_path: Path) -> None:
    ranks = [result(x) for x in [start("plain", tmp_path / "cache") for _ in range(2)]]
    compiled = [x["counts"].get("compiled", 0) for x in ranks]
    cached = [x["counts"].get("cached", 0) for x in ranks]
    assert sum(compiled) == sum(cached) > 0
    assert compiled[0] + cached[0] == compiled[1] + cached[1] == sum(compiled)


def test_without_a_cache_dir_the_next_process_finds_what_was_compiled(tmp_path: Path) -> None:
    # Inductor moves Triton's folder at its first kernel, in a process where nobody has named one.
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    folder = tmp_path / "unused"
    first, again = [result(start("default folders", folder, **home)) for _ in range(2)]
    assert set(first["counts"]) == {"compiled"}
    assert again["counts"] == {"cached": first["counts"]["compiled"]}
    assert any((tmp_path / ".triton" / "cache").rglob("*.cubin"))


def test_cuda_graphs_are_captured_before_the_seal(tmp_path: Path) -> None:
    found = result(start("cuda graphs", tmp_path / "cache"))
    assert found["graphs"] == [[16, 1, ""], [2, 0, ""], [1, 1, ""]]
    assert found["calls"] == 3
