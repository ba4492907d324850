"""A cache folder of the fake compiler, and warmups of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_jit
import pytest

from compile_ext.ops.device import Target
from compile_ext.warming import UnitResult, warm_units

TARGET = Target((9, 0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake compiler keeps its cache and its log."""
    monkeypatch.setenv(fake_jit.FOLDER, str(tmp_path))
    return tmp_path


Warm = Callable[..., dict[str, UnitResult]]


@pytest.fixture
def warm(folder: Path) -> Warm:
    """``warm("a", "b fail", ...)``: units of a key and words; their results by key."""

    def run(*texts: str, **options: Any) -> dict[str, UnitResult]:
        parts = [text.partition(" ") for text in texts]
        units = [fake_jit.unit(key, words) for key, _, words in parts]
        results = warm_units(units, TARGET, **{"progress": False, "jobs": 1, **options})
        assert [x.unit for x in results] == units
        return {x.unit.key: x for x in results}

    return run
