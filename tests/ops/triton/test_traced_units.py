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
from compile_ext.ops.triton_compiler import TRITON

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


@pytest.mark.parametrize("named", [["k.json"], ["k.cubin", "k.json", "k.ptx"], []], ids=len)
def test_a_group_that_does_not_name_its_files_is_damaged(named: list[str], tmp_path: Path) -> None:
    """Triton takes what the group names: without its cubin it would compile anew."""
    for name in ("k.json", "k.cubin"):
        (tmp_path / name).write_text("{}")
    group = tmp_path / "__grp__k.json"
    group.write_text(json.dumps({"child_paths": {x: f"/elsewhere/{x}" for x in named}}))
    with pytest.raises(ValueError, match="does not name the files that are there"):
        TRITON.arrived(tmp_path)
    group.write_text(json.dumps({"child_paths": {x: "/old" for x in ("k.json", "k.cubin")}}))
    assert TRITON.arrived(tmp_path) == (group.name,)
    found = json.loads(group.read_text())["child_paths"]
    assert found == {x: str(tmp_path / x) for x in ("k.json", "k.cubin")}
