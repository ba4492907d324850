"""What is planned for a site is what its calls launch, at each number of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compile_ext.ops import triton_compiler

SCRIPT = Path(__file__).with_name("plan_units.py")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_no_call_needs_what_was_not_planned_and_nothing_idle_is(planned: Any) -> None:
    found = planned["coverage"]
    assert [x for x in found if x["missing"] or x["idle"]] == []
    units = {(x["op"], x["kernel"]): x["units"] for x in found}
    # Classes of M: 1, multiples of 16, others; strides of its scales alike; tiles of 16 to 128.
    assert units["scaled_mm", "triton"] == 9
    assert units["rms_norm", "triton"] == 1
    assert len(units) == 18


def test_what_is_compiled_ahead_is_found_where_it_was_moved_to(planned: Any) -> None:
    assert planned["ahead"]["entries"] == 1
    assert planned["ahead"]["hits"] == [True, True]


def test_a_patch_of_anothers_stays_and_launches_still_arrive() -> None:
    from triton.runtime.jit import JITFunction

    jit: Any = JITFunction
    before, arrived = jit.run, []
    try:
        jit.run = lambda self, *args: arrived.append(args)
        with triton_compiler.noting():
            ours = jit.run
            jit.run = theirs = lambda self, *args: ours(self, *args)
        assert jit.run is theirs
        with triton_compiler.noting():
            assert jit.run is not theirs
        assert jit.run is theirs
        jit.run(None, 5)
        assert arrived == [(5,)]
    finally:
        jit.run = before
