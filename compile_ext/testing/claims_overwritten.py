"""``overwritten``: whatever the buffer held, it holds the same afterwards."""

from __future__ import annotations

from compile_ext.testing.memory import filled, poisoned_copy
from compile_ext.testing.poison import poisons
from compile_ext.testing.report import NOT_EXERCISED, PROVED, Claim, proved_arguments
from compile_ext.testing.trial import Trial


def prove_overwritten(trial: Trial) -> list[Claim]:
    claims = [_prove(trial, name) for name in trial.contract.overwritten]
    return [*claims, *_together(trial, proved_arguments(trial.contract.overwritten, claims))]


def _together(trial: Trial, names: list[str]) -> list[Claim]:
    """A pass leaves all of them uninitialised."""
    if len(names) < 2:
        return []
    claim = f"overwritten {', '.join(map(repr, names))}"
    label = f"{claim}: all of them filled with 0xFF bytes before"
    fix = "write every element of them without reading one, or take it out of overwritten"
    changes = {name: poisoned_copy(trial.arguments[name]) for name in names}
    trial.require_same(label, trial.run(label, changes), trial.baseline, fix)
    return [Claim(claim, PROVED, "equal bits after 0xFF bytes in all of them")]


def _prove(trial: Trial, name: str) -> Claim:
    claim = f"overwritten {name!r}"
    value = trial.tensor(name)
    if value is None:
        return Claim(claim, NOT_EXERCISED, f"{name} is None in these inputs: pass a tensor")
    if other := trial.shares_written_memory(name):
        return Claim(claim, NOT_EXERCISED, f"{name} lies in the memory of {other}")
    if not value.numel():
        return Claim(claim, NOT_EXERCISED, f"{name} has no elements in these inputs")
    fix = f"write every element of {name!r} without reading it, or take it out of overwritten"
    patterns = poisons(value.dtype)
    for poison, pattern in patterns.items():
        label = f"{claim}: argument {name!r} filled with {poison} before"
        got = trial.run(label, {name: filled(value, pattern)})
        trial.require_same(label, got, trial.baseline, fix)
    return Claim(claim, PROVED, f"equal bits after {', '.join(patterns)}")
