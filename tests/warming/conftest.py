"""A cache folder of the fake compiler, and warmups of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_jit
import pytest
from forks import Fork, ForkedWorker
from warm_units import warm_units

from compile_ext.ops.device import Target
from compile_ext.warming import UnitResult, worker_process

TARGET = Target((9, 0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake compiler keeps its cache and its log."""
    monkeypatch.setenv(fake_jit.FOLDER, str(tmp_path))
    return tmp_path


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked: see forks.py."""
    monkeypatch.setattr(worker_process.subprocess, "Popen", ForkedWorker)


Warm = Callable[..., dict[str, UnitResult]]


@pytest.fixture
def warm(folder: Path) -> Warm:
    """``warm("a", "b fail", ...)``: units of a key and words; their results by key."""

    def run(*texts: str, **options: Any) -> dict[str, UnitResult]:
        parts = [text.partition(" ") for text in texts]
        units = [fake_jit.unit(key, words) for key, _, words in parts]
        results = warm_units(units, TARGET, **{"jobs": 1, **options})
        assert [x.unit for x in results] == units
        return {x.unit.key: x for x in results}

    return run


@pytest.fixture
def in_fork(folder: Path, warm: Warm, forked: None) -> Callable[..., Fork]:
    """``warm`` in a process of its own, whose result is the status of each key."""
    count = iter(range(10_000))

    def start(*texts: str, **options: Any) -> Fork:
        def statuses() -> dict[str, str]:
            return {key: x.status for key, x in warm(*texts, **options).items()}

        return Fork(statuses, folder / f"result{next(count)}.json")

    return start
