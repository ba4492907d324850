"""Before any claim: the op is deterministic, writes what its schema says, and owns its results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compile_ext.ops.errors import ClaimError
from compile_ext.testing.compare import bits_differ
from compile_ext.testing.memory import as_bytes, covered, storage_id, tensors_in
from compile_ext.testing.process.isolated import Outcome
from compile_ext.testing.process.messages import Raised
from compile_ext.testing.report import HOLDS, Claim
from compile_ext.testing.trial import Trial, passed_on


def prove_clean(trial: Trial) -> list[Claim]:
    """Run it twice, which sets ``trial.clean``.

    Where the op raises for inputs that are not aligned, the trial goes on with aligned ones: a
    kernel may refuse with any exception.

    Raises:
        ClaimError: the two runs differ, an argument changed, a result lies in an argument.
        Exception: whatever the op raised.
    """
    first = _first_run(trial)
    second = trial.run("second clean run")
    if isinstance(second, Raised):
        raise passed_on(second)
    difference = trial.first_difference(second, first)
    if difference is not None:
        name, found = difference
        raise ClaimError(
            trial.where,
            f"second clean run: {found.of(name)}: the op is not deterministic for these inputs",
            f"{found.wanted} as in the first clean run",
            "take inputs or a mode for which it is deterministic: else nothing can be proved",
        )
    trial.clean = first
    refuse_writes(trial, "clean run", trial.arguments, first)
    _refuse_shared_results(trial, first)
    how = "deterministic, writes nothing undeclared, no undeclared alias"
    return [Claim("clean runs", HOLDS, how)]


def _first_run(trial: Trial) -> Outcome:
    first = trial.run("clean run")
    if isinstance(first, Outcome):
        return first
    aligned = trial.aligned_arguments()
    if aligned is None:
        raise passed_on(first)
    changes, what = aligned
    again = trial.run(f"clean run, {what}", changes)
    if isinstance(again, Raised):
        raise passed_on(first)
    trial.arguments |= changes
    trial.notes.append(f"the op refuses these inputs; all runs are with {what} ({first.text})")
    return again


def refuse_writes(trial: Trial, label: str, before: dict[str, object], after: Outcome) -> None:
    """Raises ClaimError where a run changed memory of an argument that its schema does not let it
    write; the memory around the elements counts."""
    fix = "declare it mutable in the schema, like Tensor(a!), or do not write it"
    written: dict[int, Tensor] = {}  # storage -> the bytes that the op may write
    for name in trial.written:
        for x, y in zip(tensors_in(before[name]), tensors_in(after.arguments[name]), strict=True):
            at, mine = storage_id(x), covered(x)
            if y.shape != x.shape:  # resized: it may fill what it has grown by
                both = min(mine.numel(), as_bytes(y).numel())
                mine[:both] |= covered(y)[:both]
            written[at] = written[at] | mine if at in written else mine
    for name, value in before.items():
        for x, y in zip(tensors_in(value), tensors_in(after.arguments[name]), strict=True):
            may = written.get(storage_id(x))
            found = bits_differ(y, x) if may is None else None
            if found is not None:
                what = f"{label}: argument {name!r} was written: {found.of(repr(name))}"
                raise ClaimError(trial.where, what, f"{found.wanted} as before the call", fix)
            both = min(as_bytes(x).numel(), as_bytes(y).numel())  # an op may resize its buffer
            changed = as_bytes(x)[:both] != as_bytes(y)[:both]
            changed = changed if may is None else changed & ~may[:both]
            if changed.any():
                at = int(changed.nonzero()[0]) // x.element_size() - int(x.storage_offset())
                what = f"{label}: memory outside of argument {name!r} was written, {_place(x, at)}"
                fix = "write inside of the tensor only"
                raise ClaimError(trial.where, what, "no such write", fix)


def _place(x: Tensor, at: int) -> str:
    """Where ``at`` lies, counted in elements from the first one of ``x``."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    if at < 0:
        return f"{_elements(-at)} before its first one"
    if at > last:
        return f"{_elements(at - last)} behind its last one"
    return f"between its elements, {_elements(at)} behind the first one"


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


def _refuse_shared_results(trial: Trial, clean: Outcome) -> None:
    returns, schema = trial.op._schema.returns, trial.op._schema.arguments
    results = clean.results if isinstance(clean.results, tuple) else (clean.results,)
    for i, result in enumerate(results if len(returns) > 1 else (clean.results,)):
        said = returns[i].alias_info if i < len(returns) else None
        mine = {storage_id(x) for x in tensors_in(result) if x.numel()}
        sharing = [
            a for a in schema if mine & {storage_id(x) for x in tensors_in(clean.arguments[a.name])}
        ]
        if sharing and not any(_may_alias(said, a.alias_info) for a in sharing):
            name = "result" if len(returns) == 1 else f"result[{i}]"
            raise ClaimError(
                trial.where,
                f"clean run: {name} lies in the memory of argument {sharing[0].name!r}",
                "a result of its own, as the schema says",
                "clone() it, or declare the alias in the schema, like Tensor(a) -> Tensor(a)",
            )


def _may_alias(result: Any, argument: Any) -> bool:
    """Alias information of the schema, as torch gives it: None for a plain Tensor."""
    if result is None or argument is None:
        return False
    # A list's own set is empty: those of its elements are not shown.
    return not result.before_set or bool(set(result.before_set) & set(argument.before_set))
