"""Several warmups at once, and warmups that are killed at any point."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import fake_jit
import pytest
from forks import Fork

from compile_ext.warming import UnitResult
from compile_ext.warming.store import Store

Warm = Callable[..., dict[str, UnitResult]]
InFork = Callable[..., Fork]


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_processes_that_start_together_compile_each_key_once(in_fork: InFork, processes: int):
    units = [f"{key} sleep=0.01 drip" for key in "abcdef"]
    forks = [in_fork(*units, jobs=3) for _ in range(processes)]
    results = [fork.result() for fork in forks]
    assert Counter(fake_jit.compiled()) == Counter("abcdef")
    for key in "abcdef":
        statuses = Counter(result[key] for result in results)
        assert statuses == Counter(compiled=1, cached=processes - 1)


def test_a_warmup_takes_over_from_one_that_dies(in_fork: InFork, folder: Path):
    first = in_fork("a", "b hang-once", "c")
    _until(lambda: "b" in fake_jit.compiled())
    second = in_fork("a", "b hang-once", "c")
    time.sleep(0.1)  # it waits for the first
    first.kill()
    assert first.status() == -signal.SIGKILL
    assert second.result() == {"a": "cached", "b": "compiled", "c": "compiled"}
    assert Counter(fake_jit.compiled()) == Counter(a=1, b=2, c=1)
    assert _staged(folder) == []


def test_ctrl_c_ends_the_workers_and_keeps_what_is_finished(
    in_fork: InFork, warm: Warm, folder: Path
):
    running = in_fork("a", "b note-pid hang-once", "c")
    _until((folder / "pid").exists)
    running.interrupt()
    assert running.status() == 130
    worker = int((folder / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
    found = warm("a", "b hang-once", "c")
    assert [x.status for x in found.values()] == ["cached", "compiled", "compiled"]
    assert _staged(folder) == []


@pytest.mark.parametrize("rounds", [6, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", ["warmup", "worker"])
def test_nothing_half_written_survives_a_kill(
    in_fork: InFork, folder: Path, victim: str, rounds: int
):
    """Each round kills a process at a random point of three compilations, whose writes take most of
    the time, and runs another warmup after it."""
    chance = random.Random(rounds)
    died = 0
    for i in range(rounds):
        keys = [f"{i}-{x}" for x in "abc"]
        units = [f"{key} drip note-pid shared" for key in keys]
        (folder / "pid").unlink(missing_ok=True)
        running = in_fork(*units, jobs=2)
        if victim == "worker":
            _until((folder / "pid").exists)
        time.sleep(chance.uniform(0, 0.12))
        if victim == "warmup":
            running.kill()
            died += running.status() == -signal.SIGKILL
            _check_receipts(folder, keys)
        else:
            with contextlib.suppress(ProcessLookupError):  # it has finished
                os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
                died += 1
            # "cached": the worker died between the receipt and its reply.
            assert set(running.result().values()) <= {"compiled", "cached"}
        found = in_fork(*units, jobs=2).result()
        assert set(found.values()) <= {"compiled", "cached"}
        if victim == "worker":
            assert set(found.values()) == {"cached"}
        for key in keys:
            content = (folder / "cache" / f"kernel.{key}" / "kernel.bin").read_bytes()
            assert content == fake_jit.kernel_bytes(key)
        _check_receipts(folder, keys, all_there=True)
        assert _staged(folder) == []
    assert died > rounds / 3  # else it is the delay that is wrong


def _check_receipts(folder: Path, keys: list[str], all_there: bool = False) -> None:
    """Whatever counts as compiled is whole."""
    store = Store(fake_jit.FAKE, folder / "cache")
    for key in keys:
        state = store.look(key).state
        assert state == "whole" or (state == "missing" and not all_there)
        if state == "whole":
            content = (folder / "cache" / f"kernel.{key}" / "kernel.bin").read_bytes()
            assert content == fake_jit.kernel_bytes(key)


def _staged(folder: Path) -> list[str]:
    return [x.name for x in (folder / "cache" / ".compile_ext" / "stage").iterdir()]


def _until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 30.0  # a process that was forked is there in 0.1 s
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.002)
