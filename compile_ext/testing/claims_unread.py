"""``unread``: whatever the argument holds, and where it is optional None, nothing changes."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_ext.ops.contract import is_optional, is_unread
from compile_ext.testing.memory import filled, poisoned_copy
from compile_ext.testing.messages import Raised
from compile_ext.testing.poison import poisons
from compile_ext.testing.report import NOT_EXERCISED, PROVED, Claim, proved_arguments
from compile_ext.testing.trial import ClaimError, Trial


def prove_unread(trial: Trial) -> list[Claim]:
    fakes = _fakes(trial) if trial.contract.unread else {}
    claims = [_prove(trial, name, fakes) for name in trial.contract.unread]
    return [*claims, *_together(trial, proved_arguments(trial.contract.unread, claims))]


def _together(trial: Trial, names: list[str]) -> list[Claim]:
    """A pass strips all of them: the op must not need one where it has not got another."""
    if len(names) < 2:
        return []
    claim = f"unread[{', '.join(map(repr, names))}]"
    what = " and ".join(map(repr, names))
    fix = f"the op reads one of {what} for such calls of the other: mend it, or the predicates"
    poisoned = {name: poisoned_copy(trial.arguments[name]) for name in names}
    without = {n: None if is_optional(trial.op, n) else x for n, x in poisoned.items()}
    kinds: dict[str, dict[str, Any]] = {"0xFF bytes": poisoned}
    if None in without.values():
        kinds["None"] = without
    for how, changes in kinds.items():
        label = f"{claim}: all of them {how}"
        trial.require_same(label, trial.run(label, changes), trial.baseline, fix)
    return [Claim(claim, PROVED, f"equal bits with all of them {', '.join(kinds)}")]


def _prove(trial: Trial, name: str, fakes: dict[str, Any]) -> Claim:
    claim = f"unread[{name!r}]"
    if not is_unread(trial.op, trial.contract, name, fakes):
        return Claim(claim, NOT_EXERCISED, "the predicate says False for these inputs")
    value = trial.tensor(name)
    if value is None:
        return Claim(claim, NOT_EXERCISED, f"{name} is None in these inputs: pass a tensor")
    if other := trial.shares_written_memory(name):
        return Claim(
            claim, NOT_EXERCISED, f"{name} lies in the memory of {other}, which is written"
        )
    fix = f"the op reads {name!r}: mend it, or let the predicate say False for such calls"
    names = []
    for poison, pattern in poisons(value.dtype).items():
        label = f"{claim}: argument {name!r} filled with {poison}"
        got = trial.run(label, {name: filled(value, pattern)})
        trial.require_same(label, got, trial.baseline, fix)
        names.append(poison)
    how = f"equal bits with {', '.join(names)}"
    if not is_optional(trial.op, name):
        return Claim(claim, PROVED, f"{how}; the schema does not allow None")
    label = f"{claim}: argument {name!r} None"
    trial.require_same(label, trial.run(label, {name: None}), trial.baseline, fix)
    return Claim(claim, PROVED, f"{how}, None; {_fake_takes_none(trial, name, label)}")


def _fake_takes_none(trial: Trial, name: str, label: str) -> str:
    """The compiler gives the fake what the op gets."""
    given, without = (
        trial.child.fake(label, trial.op, arguments, trial.devices_of(arguments))
        for arguments in (trial.arguments, {**trial.arguments, name: None})
    )
    if isinstance(given, Raised):
        return f"the fake was not tried with None: it raises as it is ({_short(given.text)})"
    if given == without:
        return "the fake takes None"
    found = f"raises {without.text}" if isinstance(without, Raised) else f"gives {without}"
    raise ClaimError(
        trial.where,
        f"{label}: the fake {found}",
        f"{given}, as with a tensor",
        f"let the fake accept {name}=None",
    )


def _fakes(trial: Trial) -> dict[str, Any]:
    """The arguments as the predicate gets them from a pass."""
    devices = iter(trial.devices_of(trial.arguments))

    def fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        device = next(devices)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with FakeTensorMode():
        fakes: dict[str, Any] = pytree.tree_map(fake, trial.arguments)
    return fakes


def _short(text: str) -> str:
    line = text.splitlines()[0]
    return line if len(line) <= 100 else f"{line[:97]}..."
