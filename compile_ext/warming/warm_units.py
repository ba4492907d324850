"""Compile units: the lower of the two ways in."""

from __future__ import annotations

from collections.abc import Iterable

from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target
from compile_ext.warming.progress import Progress
from compile_ext.warming.results import UnitResult


def warm_units(
    units: Iterable[CompileUnit],
    target: Target,
    *,
    jobs: int | None = None,
    budget_seconds: float | None = None,
    progress: bool = True,
) -> tuple[UnitResult, ...]:
    """Compile what is not on disk, in the given order.

    Args:
        units: one that comes twice is compiled once.
        jobs, budget_seconds, progress: as for ``compile_ext.warmup``.

    Returns a result for each unit, in their order. A unit that fails is a result, not an error.

    Raises:
        KeyboardInterrupt: after all workers have ended; what they had finished stays.
    """
    from compile_ext.warming.engine import Engine  # which `import compile_ext` need not

    with Progress(progress) as shown:
        engine = Engine(target, jobs=jobs, budget_seconds=budget_seconds, progress=shown)
        return engine.run(units).results
