"""What became of a compile unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compile_ext.ops.compile_unit import CompileUnit

Status = Literal["compiled", "cached", "failed", "skipped"]


@dataclass(frozen=True)
class UnitResult:
    """What became of one unit.

    Args:
        unit: which.
        status: compiled by this warmup; cached: it was there, whole; failed; skipped: not tried.
        seconds: wall time of the compilation, 0 where there was none.
        reason: why it failed or was skipped, or what was found before it was compiled; "" else.
    """

    unit: CompileUnit
    status: Status
    seconds: float = 0.0
    reason: str = ""
