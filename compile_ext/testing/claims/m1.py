"""``m1_variant``: for one token, both ops compute the same."""

from __future__ import annotations

from typing import Any

from compile_ext.ops.contract import Gemm, m_of_gemm
from compile_ext.testing.process.messages import Raised
from compile_ext.testing.report import HOLDS, NOT_EXERCISED, Claim
from compile_ext.testing.trial import Trial


def prove_m1_variant(trial: Trial) -> list[Claim]:
    variant, gemm = trial.contract.m1_variant, trial.contract.gemm
    if variant is None or gemm is None:
        return []
    claim = f"m1_variant {variant}"
    one = _one_token(trial, gemm)
    if isinstance(one, str):
        return [Claim(claim, NOT_EXERCISED, one)]
    changes, what = one
    want = trial.run(f"{claim}: the op for {what}", changes) if changes else trial.baseline
    if isinstance(want, Raised):
        why = f"M is not 1, and the op refuses {what} alone: {want.text.splitlines()[0]}"
        return [Claim(claim, NOT_EXERCISED, why)]
    label = f"{claim}: argument {gemm.a!r} with {what}"
    fix = "mend the variant, or take it out of the contract"
    trial.require_same(label, trial.run(label, changes, op=variant), want, fix, close=True)
    return [Claim(claim, HOLDS, f"same numbers within rounding, for {what}")]


def _one_token(trial: Trial, gemm: Gemm) -> tuple[dict[str, Any], str] | str:
    """What to change for M = 1, and in words; or why that cannot be told."""
    a = trial.tensor(gemm.a)
    if a is None or a.dim() == 0:
        return f"{gemm.a} is no matrix"
    axis = gemm.m_axis
    m = m_of_gemm(trial.op, gemm, a)
    if m == 1:
        return {}, "one token"
    if m == 0 or a.dim() < 2 or any(trial.tensor(x) is not None for x in trial.written):
        return f"M is {m}, not 1"
    axes = range(a.dim() - 1) if axis is None else (axis,)
    first = tuple(slice(0, 1 if d in axes else None) for d in range(a.dim()))
    changes: dict[str, Any] = {gemm.a: a[first]}
    scale, at = trial.tensor(gemm.scale_a) if gemm.scale_a else None, axis or 0
    if scale is not None and scale.dim() > at and scale.shape[at] == m:  # one a token
        changes[str(gemm.scale_a)] = scale.narrow(at, 0, 1)
    return changes, f"the first of {m} tokens"
