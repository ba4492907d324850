"""``align``: padded as the contract says, the op computes the same numbers."""

from __future__ import annotations

from torch import Tensor

from compile_ext.ops.errors import ClaimError
from compile_ext.passes.padding.alignment import Widths
from compile_ext.testing.compare import bits_differ, values_differ
from compile_ext.testing.memory import copied, fill, poison_pattern
from compile_ext.testing.process.isolated import Outcome
from compile_ext.testing.process.messages import Raised
from compile_ext.testing.report import HOLDS, NOT_EXERCISED, Claim
from compile_ext.testing.trial import Trial, in_words


def prove_align(trial: Trial) -> list[Claim]:
    dims = list(trial.contract.align)
    together = [dims] if len(dims) > 1 else []  # the fast kernels want both
    return [_prove(trial, each) for each in [*([d] for d in dims), *together]]


def _prove(trial: Trial, dims: list[str]) -> Claim:
    claim = f"align[{', '.join(map(repr, dims))}]"
    found = trial.growth()
    if isinstance(found, str):
        return Claim(claim, NOT_EXERCISED, found)
    sizes, lacking = found
    multiples = {d: trial.contract.align[d].multiple for d in dims}
    grow = {d: (lacking[d] or m if d in dims else 0) for d, m in _all(trial, multiples).items()}
    if "n" in dims and any(trial.tensor(x) is not None for x in trial.written):
        why = "the op writes an argument: its result cannot be cut, and no pass pads N"
        return Claim(claim, NOT_EXERCISED, why)
    widths = trial.widths(sizes, grow)
    if isinstance(widths, str):
        return Claim(claim, NOT_EXERCISED, f"no pass pads it: {widths}")
    names = ", ".join(widths)
    label = f"{claim}: {in_words(sizes, grow)}, {names} padded"
    fix = f"mend the pad values or the axes of {names} in align, or the op"
    changes = trial.padded(widths)
    got = trial.run(label, changes)
    if isinstance(got, Raised):
        found_text = f"{label}: the op raises {got.text}"
        raise ClaimError(trial.where, found_text, "the result of the call as it was given", fix)
    n = sizes["n"] if "n" in dims else None
    _compare(trial, label, got, n, sizes["n"] + grow.get("n", 0), fix)
    how = f"{in_words(sizes, grow)}: same numbers within rounding"
    return Claim(claim, HOLDS, f"{how}{_read_pads(trial, label, changes, widths, got, n)}")


def _all(trial: Trial, multiples: dict[str, int]) -> dict[str, int]:
    return {d: multiples.get(d, 0) for d in trial.contract.align}


def _compare(trial: Trial, label: str, got: Outcome, n: int | None, wide: int, fix: str) -> None:
    if n is None:
        trial.require_same(label, got, trial.baseline, fix, close=True)
        return
    result, want = got.results, trial.baseline.results  # the registry saw to it: one Tensor
    if tuple(result.shape) != (*want.shape[:-1], wide):
        found = f"{label}: a result of shape {list(result.shape)}"
        wanted = f"{[*want.shape[:-1], wide]}: {n} columns and the padded ones"
        raise ClaimError(trial.where, found, wanted, "mend the op: its result is [..., n]")
    difference = values_differ(result[..., :n], want, trial.tolerance_of(want))
    if difference is not None:
        found, wanted = (
            f"{label}: {difference.of('result')}",
            f"{difference.wanted} within rounding",
        )
        raise ClaimError(trial.where, found, wanted, fix)


def _read_pads(
    trial: Trial,
    label: str,
    changes: dict[str, Tensor],
    widths: dict[str, Widths],
    padded: Outcome,
    n: int | None,
) -> str:
    """Which new rows of weights, scales and bias the first n columns depend on. Those of K are in
    every sum."""
    if n is None or trial.gemm.a in widths:
        return ""
    read: list[str] = []
    for name, axes in widths.items():
        poisoned: Tensor = copied(changes[name])
        for axis, (extra, _) in axes.items():
            size = poisoned.shape[axis]
            fill(poisoned.narrow(axis, size - extra, extra), poison_pattern(poisoned.dtype))
        got = trial.run(f"{label}: pads of {name!r} poisoned", {**changes, name: poisoned})
        if isinstance(got, Raised) and "CUDA error" in got.text:  # nothing runs after it
            found = f"{label}: with the pads of argument {name!r} poisoned the op raises {got.text}"
            raise ClaimError(trial.where, found, "a result", "mend the op")
        same = isinstance(got, Outcome) and not bits_differ(
            got.results[..., :n], padded.results[..., :n]
        )
        read += [] if same else [name]
    if not read:
        return "; the pads are not read"
    return f"; the kept columns change if the pads of {', '.join(read)} hold something else"
