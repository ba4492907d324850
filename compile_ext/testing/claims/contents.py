"""``unread`` and ``overwritten``: whatever the argument holds before the call, nothing changes."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_ext.ops.contract import is_optional, is_unread
from compile_ext.ops.errors import ClaimError
from compile_ext.testing.claims.poison import poisons
from compile_ext.testing.memory import filled, poisoned_copy
from compile_ext.testing.process.messages import Raised
from compile_ext.testing.report import HOLDS, NOT_EXERCISED, Claim, holding
from compile_ext.testing.trial import Trial


def prove_unread(trial: Trial) -> list[Claim]:
    """Also with None where the argument is optional, as a pass strips it."""
    names = list(trial.contract.unread)
    fakes = _fakes(trial) if names else {}
    claims = [_prove_unread(trial, name, fakes) for name in names]
    together = holding(names, claims)
    claim = f"unread[{', '.join(map(repr, together))}]"
    optional = [name for name in together if is_optional(trial.op, name)]
    fix = "mend the op, or let a predicate say False where the op needs one of them"
    return claims + _all_at_once(trial, claim, together, fix, without=optional)


def prove_overwritten(trial: Trial) -> list[Claim]:
    names = list(trial.contract.overwritten)
    claims = []
    for name in names:
        fix = f"write every element of {name!r} without reading it, or take it out of overwritten"
        claims.append(_any_contents(trial, f"overwritten {name!r}", name, fix))
    together = holding(names, claims)
    claim = f"overwritten {', '.join(map(repr, together))}"
    fix = "write every element of them without reading one, or take it out of overwritten"
    return claims + _all_at_once(trial, claim, together, fix, without=[])


def _any_contents(trial: Trial, claim: str, name: str, fix: str) -> Claim:
    value = trial.tensor(name)
    if value is None:
        return Claim(claim, NOT_EXERCISED, f"{name} is None in these inputs: pass a tensor")
    if other := trial.shares_written_memory(name):
        why = f"{name} lies in the memory of {other}, and the op writes there"
        return Claim(claim, NOT_EXERCISED, why)
    if not value.numel():
        return Claim(claim, NOT_EXERCISED, f"{name} has no elements in these inputs")
    patterns = poisons(value.dtype)
    for poison, pattern in patterns.items():
        label = f"{claim}: argument {name!r} filled with {poison}{_before(trial, name)}"
        got = trial.run(label, {name: filled(value, pattern)})
        trial.require_same(label, got, trial.baseline, fix, why=_why(trial, [name]))
    return Claim(claim, HOLDS, f"equal bits with {', '.join(patterns)}")


def _all_at_once(
    trial: Trial, claim: str, names: list[str], fix: str, *, without: list[str]
) -> list[Claim]:
    """A pass takes all of them: the op must not need one where it has not got another.

    Args:
        without: those that can be None.
    """
    if len(names) < 2:
        return []
    poisoned: dict[str, Any] = {name: poisoned_copy(trial.arguments[name]) for name in names}
    kinds = {"poisoned": poisoned}
    if without:
        kinds["None"] = {**poisoned, **dict.fromkeys(without)}
    for how, changes in kinds.items():
        label = f"{claim}: all of them {how}{_before(trial, names[0])}"
        got = trial.run(label, changes)
        trial.require_same(label, got, trial.baseline, fix, why=_why(trial, names))
    return [Claim(claim, HOLDS, f"equal bits with all of them {', '.join(kinds)}")]


def _before(trial: Trial, name: str) -> str:
    return " before" if name in trial.written else ""


def _why(trial: Trial, names: list[str]) -> str:
    """What a difference means."""
    reads = f"the op reads {' or '.join(map(repr, names))}"
    return f"{reads}, or leaves some of it" if names[0] in trial.written else reads


def _prove_unread(trial: Trial, name: str, fakes: dict[str, Any]) -> Claim:
    claim = f"unread[{name!r}]"
    if not is_unread(trial.op, trial.contract, name, fakes):
        return Claim(claim, NOT_EXERCISED, "the predicate says False for these inputs")
    fix = f"mend the op, or let the predicate of {name!r} say False for such calls"
    found = _any_contents(trial, claim, name, fix)
    if found.status != HOLDS:
        return found
    if not is_optional(trial.op, name):
        return Claim(claim, HOLDS, f"{found.how}; the schema does not allow None")
    label = f"{claim}: argument {name!r} None"
    got = trial.run(label, {name: None})
    trial.require_same(label, got, trial.baseline, fix, why=_why(trial, [name]))
    return Claim(claim, HOLDS, f"{found.how}, None; {_fake_takes_none(trial, name, label)}")


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
