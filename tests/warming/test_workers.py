"""Worker processes: what they compile, and what becomes of a unit whose worker fails or dies."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fake_jit
import pytest
from warm_units import warm_units

from compile_ext.ops.device import Target
from compile_ext.warming import UnitResult, pool
from compile_ext.warming.capacity import Capacity

Warm = Callable[..., dict[str, UnitResult]]
forked = pytest.mark.usefixtures("forked")


def test_units_are_compiled_once_and_found_by_the_next_warmup(warm: Warm, folder: Path):
    first = warm("a", "b", "c", jobs=2)
    assert [x.status for x in first.values()] == ["compiled"] * 3
    for key in "abc":
        entry = folder / "cache" / f"kernel.{key}"
        assert (entry / "kernel.bin").read_bytes() == fake_jit.kernel_bytes(key)
        assert (entry / fake_jit.PLACE).read_text() == str(entry)
    again = warm("a", "b", "c", "d")
    assert {k: x.status for k, x in again.items()} == {
        **dict.fromkeys("abc", "cached"),
        "d": "compiled",
    }
    assert sorted(fake_jit.compiled()) == ["a", "b", "c", "d"]


@forked
def test_the_order_is_the_given_one(warm: Warm, folder: Path):
    warm(*"dacb")
    assert fake_jit.compiled() == ["d", "a", "c", "b"]


@forked
def test_a_failure_costs_its_unit_alone(warm: Warm, folder: Path):
    found = warm("c nothing", "a fail", "b", "d noise", "e quota", "f")
    assert {k: x.status for k, x in found.items()} == {
        "c": "failed",
        "a": "failed",
        "b": "compiled",
        "d": "compiled",  # what it prints goes nowhere near the protocol
        "e": "failed",
        "f": "compiled",
    }
    assert found["a"].reason == "RuntimeError: the fake compiler refuses"
    assert "has made no file" in found["c"].reason
    assert found["e"].reason.startswith(f"no space left for {folder / 'cache'}: ")
    entries = sorted(x.name for x in (folder / "cache").iterdir())
    assert entries == [".compile_ext", "kernel.b", "kernel.d", "kernel.f"]
    assert list((folder / "cache" / ".compile_ext" / "stage").iterdir()) == []


@forked
@pytest.mark.parametrize(
    ("needs_gpu", "seen"),
    [
        ((False, False), ["0", "blind", "1", "blind"]),
        # One worker does all, in their order: to start another takes as long as a kernel.
        ((False, True, False), ["0", "3", "1", "3", "2", "3"]),
    ],
)
def test_a_worker_sees_the_gpu_if_a_unit_needs_one(
    needs_gpu: tuple[bool, ...],
    seen: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("compile_ext.warming.engine.visible_devices", lambda: "3")
    compilers = [fake_jit.ON_GPU if x else fake_jit.FAKE for x in needs_gpu]
    units = [fake_jit.unit(f"{i}", "note-devices", x) for i, x in enumerate(compilers)]
    found = warm_units(units, Target((9, 0)), jobs=1)
    assert [x.status for x in found] == ["compiled"] * len(units)
    assert fake_jit.compiled() == seen


@forked
def test_the_gpu_takes_fewer_workers_than_the_host(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("compile_ext.warming.engine.visible_devices", lambda: "3")
    few = Capacity(jobs=2, device_jobs=1, bound_by="a small GPU")
    monkeypatch.setattr("compile_ext.warming.engine.capacity", lambda units, jobs: few)
    compilers = [fake_jit.ON_GPU, fake_jit.ON_GPU, fake_jit.FAKE]
    words = "note-devices sleep=0.5"
    units = [fake_jit.unit(f"{i}", words, x) for i, x in enumerate(compilers)]
    found = warm_units(units, Target((9, 0)))
    assert [x.status for x in found] == ["compiled"] * 3
    seen = [x for x in fake_jit.compiled() if x not in ("0", "1", "2")]
    assert sorted(seen[:2]) == ["3", "blind"]
    assert seen[2] == "3"


@forked
def test_workers_that_do_not_start_on_the_gpu_fail_its_units_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("compile_ext.warming.engine.visible_devices", lambda: "dies")
    few = Capacity(jobs=3, device_jobs=1, bound_by="a small GPU")
    monkeypatch.setattr("compile_ext.warming.engine.capacity", lambda units, jobs: few)
    units = [fake_jit.unit(f"{i}", "sleep=0.1", fake_jit.ON_GPU) for i in range(3)]
    units += [fake_jit.unit(f"{i}", "sleep=0.1") for i in range(3, 6)]
    found = warm_units(units, Target((9, 0)))
    assert [x.status for x in found] == ["failed"] * 3 + ["compiled"] * 3
    assert {x.reason for x in found[:3]} == {"a worker did not start: it died of SIGKILL"}


@forked
def test_each_unit_is_told_on_stderr(warm: Warm, capsys: pytest.CaptureFixture[str]):
    warm("a", "b fail", progress=True)
    said = capsys.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    assert first.startswith("[1/2] compiled fake plain (0.")
    assert second.startswith("[2/2] failed fake fail (0.")
    assert second.endswith("s): RuntimeError: the fake compiler refuses")


@forked
def test_a_unit_whose_worker_dies_gets_another_one_once(warm: Warm, folder: Path):
    found = warm("a die-once", "b die", "c")
    assert {k: x.status for k, x in found.items()} == {
        "a": "compiled",
        "b": "failed",
        "c": "compiled",
    }
    reason = "its worker died of SIGKILL; it said last: about to die"
    assert found["a"].reason == found["b"].reason == reason
    assert sorted(fake_jit.compiled()) == ["a", "a", "b", "b", "c"]
    # What a dead worker was writing is in its stage, and gone with it.
    assert [x.name for x in (folder / "cache").rglob("half")] == []
    assert list((folder / "cache" / ".compile_ext" / "stage").iterdir()) == []


@forked
def test_a_worker_whose_child_holds_its_pipes_is_missed_when_it_dies(
    warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool, "HEARTBEAT", 0.05)
    start = time.monotonic()
    found = warm("a orphan", "b")
    assert (found["a"].status, found["a"].reason) == ("failed", "its worker died of SIGKILL")
    assert found["b"].status == "compiled"
    assert time.monotonic() - start < 60  # and not UNIT_SECONDS


@forked
def test_a_compiler_that_reads_stdin_finds_its_end(warm: Warm, folder: Path):
    found = warm("a read-stdin", "b")
    assert [x.status for x in found.values()] == ["compiled", "compiled"]


@forked
def test_a_compiler_may_change_its_working_directory(
    warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(fake_jit.FakeJit, "folder", lambda self: Path("cache"))
    found = warm("a chdir", "b", "c")
    assert [x.status for x in found.values()] == ["compiled"] * 3
    assert (folder / "cache" / "kernel.c").is_dir()


def test_workers_import_what_the_caller_imports(
    warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not a module of the working directory, and what is no string on the path is passed over."""
    (folder / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, folder])
    assert warm("a")["a"].status == "compiled"


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_worker_that_the_system_does_not_start_fails_all(
    warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
):
    monkeypatch.setenv("TOO_LARGE", "x" * 2**18)  # Linux takes 128 KiB a variable
    found = warm("a", "b", jobs=jobs)
    reason = "a worker did not start: [Errno 7] Argument list too long"
    for x in found.values():
        assert x.status == "failed"
        assert x.reason.startswith(reason)


@forked
def test_fewer_workers_than_wanted_do_it_all(
    warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[None] = []

    class Few(pool.WorkerProcess):
        def __init__(self, devices: str) -> None:
            if started:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            started.append(None)
            super().__init__(devices)

    monkeypatch.setattr(pool, "WorkerProcess", Few)
    found = warm("a", "b", "c", jobs=3)
    assert [x.status for x in found.values()] == ["compiled"] * 3


@forked
def test_nobody_need_read_the_progress(warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch):
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stderr", os.fdopen(writing, "w", buffering=1))
    found = warm("a", "b", progress=True)
    assert [x.status for x in found.values()] == ["compiled", "compiled"]
    monkeypatch.setattr(sys, "stderr", open("/dev/full", "w", buffering=1))  # noqa: SIM115
    assert warm("c", progress=True)["c"].status == "compiled"


@forked
def test_a_unit_that_takes_too_long_is_ended(
    warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("compile_ext.warming.engine.UNIT_SECONDS", 0.3)
    found = warm("a hang", "b")
    assert (found["a"].status, found["a"].reason) == ("failed", "took longer than 0.3 s")
    assert found["b"].status == "compiled"


def test_a_missing_backend_skips_its_units(folder: Path):
    (found,) = warm_units([fake_jit.unit("a")], Target((8, 0)))
    assert (found.status, found.reason) == ("skipped", "compiles for sm_90 alone")


@forked
def test_no_unit_is_begun_after_the_budget(warm: Warm, folder: Path):
    found = warm("a", "b", budget_seconds=0.0)
    assert {x.reason for x in found.values()} == {"the time budget of 0 s"}
    assert {x.status for x in found.values()} == {"skipped"}
    assert fake_jit.compiled() == []


def test_a_unit_of_a_module_that_no_worker_can_import_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fake_jit.FakeJit, "__module__", "not_on_any_path")
    unit = fake_jit.unit("a")
    monkeypatch.setitem(__import__("sys").modules, "not_on_any_path", fake_jit)
    (found,) = warm_units([unit], Target((9, 0)))
    assert found.status == "failed"
    assert "ModuleNotFoundError: No module named 'not_on_any_path'" in found.reason


def test_workers_that_do_not_start_fail_all_units(warm: Warm, monkeypatch: pytest.MonkeyPatch):
    boot = "import sys; sys.exit('no torch here')"
    monkeypatch.setattr("compile_ext.warming.worker_process._BOOT", boot)
    found = warm("a", "b", "c")
    reason = "a worker did not start: it ended with status 1; it said last: no torch here"
    assert {(x.status, x.reason) for x in found.values()} == {("failed", reason)}
