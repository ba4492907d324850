"""What ``check_contract`` found: one line for each claim of the contract."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

HOLDS: Literal["holds"] = "holds"
NOT_EXERCISED: Literal["not exercised"] = "not exercised"


@dataclass(frozen=True)
class Claim:
    """One claim, and what came of it. A claim that is false is an error instead.

    Args:
        name: as the contract writes it: ``unread['scale']``.
        status: ``holds``, for the inputs that were given; or ``not exercised`` by them.
        how: what was run and compared; or the reason.
    """

    name: str
    status: Literal["holds", "not exercised"]
    how: str


def holding(names: Iterable[str], claims: list[Claim]) -> list[str]:
    """Those whose claim holds; ``claims`` in the order of the names."""
    return [n for n, claim in zip(names, claims, strict=True) if claim.status == HOLDS]


@dataclass(frozen=True)
class ContractReport:
    """Every claim of one contract: it holds for the inputs, or is not exercised with the reason.

    Args:
        op: the overload's name.
        claims: in the order in which they were looked at.
        notes: what else a reader has to know of the run.
        runs: how often the op ran.
    """

    op: str
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]
    runs: int

    @property
    def holds(self) -> tuple[str, ...]:
        """The names of the claims that hold for these inputs."""
        return tuple(c.name for c in self.claims if c.status == HOLDS)

    @property
    def not_exercised(self) -> dict[str, str]:
        """The names of the claims that these inputs do not exercise, each with the reason."""
        return {c.name: c.how for c in self.claims if c.status == NOT_EXERCISED}

    def __str__(self) -> str:
        counts = f"{len(self.holds)} hold for these inputs, {len(self.not_exercised)} not exercised"
        width = max((len(c.name) for c in self.claims), default=0)
        lines = [f"  {c.status:<13}  {c.name:<{width}}  {c.how}" for c in self.claims]
        notes = [f"  note: {note}" for note in self.notes]
        return "\n".join([f"{self.op}: {counts}; {self.runs} runs", *lines, *notes])
