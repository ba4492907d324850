"""The op stays inside of its tensors; ``memory``: laid out so, it computes the same numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from compile_ext.ops.contract import Memory
from compile_ext.passes.derivation import Restride
from compile_ext.testing.claims.clean import refuse_writes
from compile_ext.testing.memory import guarded, tensors_in
from compile_ext.testing.process.isolated import Outcome
from compile_ext.testing.report import HOLDS, NOT_EXERCISED, Claim
from compile_ext.testing.trial import Trial

_BOUNDS = "bounds (every op)"
_FIX = "keep every read and write inside of the tensor; mask what a tile has beyond its end"


def prove_bounds(trial: Trial) -> list[Claim]:
    """Poison around and between the elements of each tensor in turn: bits stay, and so does it."""
    names: list[str] = []
    left_out: list[str] = []
    for name, value in trial.arguments.items():
        if not tensors_in(value):
            continue
        if other := trial.shares_written_memory(name):
            left_out.append(f"{name}, in the memory of {other}")
            continue
        for i, x in enumerate(tensors_in(value)):
            what = repr(name) if x is value else f"{name!r}[{i}]"
            label = f"{_BOUNDS}: poison around argument {what}"
            _run_guarded(trial, label, {name: _replaced(value, x, guarded(x))}, trial.baseline)
        names.append(name)
    claims = [Claim(_BOUNDS, HOLDS, f"equal bits with poison around {', '.join(names)}")]
    if left_out:
        claims.append(Claim(_BOUNDS, NOT_EXERCISED, "; ".join(left_out)))
    return claims if names else claims[1:] or [Claim(_BOUNDS, NOT_EXERCISED, "no tensors")]


def prove_memory(trial: Trial) -> list[Claim]:
    return [_prove(trial, name, memory) for name, memory in trial.contract.memory.items()]


def _prove(trial: Trial, name: str, memory: Memory) -> Claim:
    claim = f"memory[{name!r}]"
    x = trial.tensor(name)
    if x is None or not x.numel():
        return Claim(claim, NOT_EXERCISED, f"{name} is {'None' if x is None else 'empty'}")
    made = Restride(memory.stride, memory.address)(x)
    if made.stride() == x.stride() and memory.stride > 1:  # it fits: rows that are further apart do
        made = torch.empty_strided(x.shape, _roomy(x, memory.stride), dtype=x.dtype).copy_(x)
    strides = f"strides {tuple(made.stride())}"
    label = f"{claim}: argument {name!r} with {strides}"
    fix = f"mend the op for such strides of {name!r}, or the claim"
    plain = trial.run(label, {name: guarded(made, byte=0)})
    want = trial.require_same(label, plain, trial.baseline, fix, close=True)
    label = f"{label}, poison between its rows"
    _run_guarded(trial, label, {name: guarded(made)}, want)
    return Claim(claim, HOLDS, f"same numbers with {strides}, and nothing between them is read")


def _run_guarded(trial: Trial, label: str, changes: dict[str, Any], want: Outcome) -> None:
    why = "the op reads what lies outside of the tensor"
    got = trial.require_same(label, trial.run(label, changes), want, _FIX, why=why)
    refuse_writes(trial, label, {**trial.arguments, **changes}, got)


def _replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    return pytree.tree_map(lambda x: new if x is old else x, value)


def _roomy(x: Tensor, multiple: int) -> tuple[int, ...]:
    """Strides in the order of those of ``x``, multiples of ``multiple``, with room in between."""
    strides, step = [0] * x.dim(), 1
    for d in sorted(range(x.dim()), key=lambda d: (x.stride(d), -d)):
        strides[d] = step
        step = (step * x.shape[d] // multiple + 1) * multiple
    return tuple(strides)
