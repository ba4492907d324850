"""A seal and Triton's compiler, which has no GPU here, but compiles for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("triton_seal.py")
NO_OP = "make this call before the seal: no op of compile_ext does, so no warmup knows of it"
EVENT = {"kind": "triton", "op": "", "modules": [], "reason": "", "fix": NO_OP, "key": 64}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# Refused, with nothing compiled; then what one call compiles; then sealed, with the kernel there.
@pytest.mark.parametrize(
    ("way", "event", "kernels"),
    [
        (
            "ahead",
            {"kernel": "add_kernel", "shapes": ["x_ptr: *fp32", "n: i32", "BLOCK: constexpr"]},
            1,
        ),
        ("gluon", {"kernel": "gluon_kernel", "shapes": ["x_ptr: *i32"]}, 1),
        (
            "op",
            {
                "kernel": "add_kernel",
                "shapes": [
                    "x: float32[7, 100]",
                    "weight: float32[100]",
                    "eps: 1e-06",
                    "round_before_weight: False",
                ],
                "op": "compile_ext::rms_norm",
                "modules": ["norm"],
                "fix": "compile_ext.warmup(model, max_tokens=7) before the seal, or more: M = 7"
                " here",
            },
            1,
        ),
    ],
)
def test_refused_then_compiled_then_loaded(
    said: dict[str, Any], way: str, event: dict[str, Any], kernels: int
) -> None:
    assert said[way] == [{**EVENT, **event}, 0, kernels, None]


def test_a_refusal_does_not_give_the_kernel_up(said: dict[str, Any]) -> None:
    assert said["given_up"] == {}


def test_a_configuration_that_autotuning_tries(said: dict[str, Any]) -> None:
    first, between, compiled, again = said["tuned"]
    assert first["kernel"] == "tuned_kernel"
    assert first["shapes"] == ["x_ptr: float32[128]", "BLOCK: 64"]
    assert first["reason"].startswith("autotuning tries BLOCK: 64, ")
    assert (between, compiled, again) == (0, 2, None)


def test_hooks_of_others_stay(said: dict[str, Any]) -> None:
    assert said["hooks"] == [["asked", "triton", "compiled"], [True, True]]
    assert said["taken_out"]
