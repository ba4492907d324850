"""Compile units without a manifest: what ``compile_ext.warmup`` does with those of a plan."""

from __future__ import annotations

import time
from collections.abc import Iterable

from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target
from compile_ext.warming import UnitResult
from compile_ext.warming.engine import Engine
from compile_ext.warming.progress import Progress


def warm_units(
    units: Iterable[CompileUnit],
    target: Target,
    *,
    jobs: int | None = None,
    budget_seconds: float | None = None,
    progress: bool = False,
) -> tuple[UnitResult, ...]:
    """A result for each unit, in their order."""
    with Progress(progress) as shown:
        engine = Engine(
            target,
            jobs=jobs,
            budget_seconds=budget_seconds,
            start=time.monotonic(),
            progress=shown,
        )
        return engine.run(units).results
