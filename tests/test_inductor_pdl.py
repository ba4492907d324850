"""Why our kernels are not launched early beside those of ``triton.enable_pdl``, and why it is safe
that they trigger early: read off the code that Inductor generates."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("inductor_pdl.py")
WAIT, TRIGGER, LOAD, STORE = "gdc_wait", "gdc_launch_dependents", "tl.load", "tl.store"


@functools.cache
def cases() -> dict[str, list[Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True, text=True, env={**environment, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def kernels(name: str) -> list[tuple[bool, list[str]]]:
    return [(call[1], call[2]) for call in cases()[name] if len(call) == 3]


def prefetched(name: str) -> list[bool]:
    return [call[1] for call in cases()[name] if len(call) == 2]


def test_what_inductor_launches_behind_an_op_waits_before_all_else() -> None:
    """So it does not matter that the op has let it start before the op itself has waited."""
    calls = cases()["layers"]
    assert [len(call) for call in calls] == [3, 2, 3, 2, 3]  # kernel, norm, kernel, norm, kernel
    for _, is_early, steps in (calls[0], calls[2], calls[4]):
        assert is_early
        assert steps[0] == WAIT
        assert steps.count(WAIT) == 1
        assert steps.index(TRIGGER) > steps.index(LOAD)


def test_what_only_stores_does_not_wait() -> None:
    """Then a kernel behind it waits for it alone, and not for what is before it. Should this fail,
    the two can be switched on together."""
    assert (True, [STORE]) in kernels("fill")


def test_a_load_may_stand_before_the_wait() -> None:
    """Of what the kernel before the last has written: it is complete, since the last one waited for
    it before it let this one start."""
    assert any(steps[:2] == [LOAD, WAIT] for _, steps in kernels("fill"))


@pytest.mark.parametrize(
    ("name", "early", "prefetches"),
    [
        ("layers", True, [False, False]),
        ("layers without", False, [False, True]),
        ("layers never", False, [False, False]),
    ],
)
def test_either_inductors_kernels_start_early_or_ours(
    name: str, early: bool, prefetches: list[bool]
) -> None:
    assert prefetched(name) == prefetches
    assert {is_early for is_early, _ in kernels(name)} == {early}
