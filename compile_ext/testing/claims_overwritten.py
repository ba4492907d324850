"""``overwritten``: whatever the buffer held, it holds the same afterwards."""

from __future__ import annotations

from compile_ext.testing.memory import filled
from compile_ext.testing.poison import poisons
from compile_ext.testing.report import NOT_EXERCISED, PROVED, Claim
from compile_ext.testing.trial import Trial


def prove_overwritten(trial: Trial) -> list[Claim]:
    return [_prove(trial, name) for name in trial.contract.overwritten]


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
