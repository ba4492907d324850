"""A real compile of each kind under a seal, through the real library: refused with nothing
compiled, heard of, and loaded by a new process. A kind that does not come about fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).with_name("seal_process.py")
KINDS = ("triton", "cute", "deep_gemm", "inductor", "dynamo")
# Of each kind the op, the beginning of the kernel's name, and what there is once it is compiled.
OPS = {
    "triton": "compile_ext::block_scaled_mm",
    "cute": "compile_ext::router_gemm",
    "deep_gemm": "compile_ext::block_scaled_mm",
}
KERNELS = {
    "triton": "_",
    "cute": "router_",
    "deep_gemm": "sm90_fp8_gemm_1d2d_impl",
    "inductor": "a graph of ",
    "dynamo": "Sequential.forward (",
}
COMPILED = {
    "triton": "triton/**/*.cubin",
    "cute": "own/kernels/*.bin",
    "deep_gemm": "deep_gemm/cache/*/kernel.cubin",
    "inductor": "inductor/fxgraph/**/*",
    "dynamo": "nothing",  # keeps nothing on disk
}
Run = Callable[[str, str], dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``(kind, way)`` in a new process, whose caches are this test's."""
    caches = {
        "TRITON_CACHE_DIR": "triton",
        "COMPILE_EXT_CACHE_DIR": "own",
        "DG_JIT_CACHE_DIR": "deep_gemm",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
    }
    environment = {**os.environ, **{name: str(tmp_path / x) for name, x in caches.items()}}

    def run(kind: str, way: str) -> dict[str, Any]:
        command = [sys.executable, str(SCRIPT), kind, way]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_refused_heard_and_loaded(kind: str, run: Run, tmp_path: Path) -> None:
    refused = run(kind, "refuse")
    assert not refused["ran"], "nothing was compiled: the kind did not come about"
    assert_event(refused["events"][0], kind)
    assert len(refused["events"]) == 1
    assert list(tmp_path.glob(COMPILED[kind])) == []

    heard = run(kind, "hear")
    assert heard["right"]
    assert {e["kind"] for e in heard["events"]} >= {kind}
    for event in heard["events"]:
        if event["kind"] == kind:
            assert_event(event, kind)
    assert bool(list(tmp_path.glob(COMPILED[kind]))) == (kind != "dynamo")

    loaded = run(kind, "load")
    assert loaded == {"events": [], "ran": True, "right": True}


def assert_event(event: dict[str, Any], kind: str) -> None:
    assert event["kind"] == kind
    assert event["kernel"].startswith(KERNELS[kind])
    assert event["op"] == OPS.get(kind, "")
    assert event["modules"] == (["layer"] if kind in OPS else [])
    assert event["shapes"]
    assert "before the seal" in event["fix"]
    assert bool(event["key"]) == (kind != "dynamo")
