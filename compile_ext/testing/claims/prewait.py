"""``prewait_reads``: what the op reads before its PDL wait is nothing but these arguments."""

from __future__ import annotations

from compile_ext.testing.process.messages import Raised
from compile_ext.testing.report import HOLDS, NOT_EXERCISED, Claim
from compile_ext.testing.trial import Trial


def prove_prewait_reads(trial: Trial) -> list[Claim]:
    """Each other argument in turn is written by the kernel right before the op, as late as it
    can."""
    if not trial.contract.prewait_reads:
        return []
    claim = f"prewait_reads {', '.join(trial.contract.prewait_reads)}"
    if not trial.on_cuda:
        return [Claim(claim, NOT_EXERCISED, "needs CUDA")]
    late: list[str] = []
    for name in trial.arguments:
        x = trial.tensor(name)
        if x is None or name in trial.contract.prewait_reads or not x.numel():
            continue
        if trial.devices[name] == ["cpu"] or trial.shares_written_memory(name):
            continue
        label = f"{claim}: argument {name!r} written late by the kernel before"
        fix = (
            f"wait (griddepcontrol.wait) before reading {name!r}; or, if only weights come there, "
        )
        got = trial.run(label, late=name)
        if not isinstance(got, Raised) and got.note:
            return [Claim(claim, NOT_EXERCISED, got.note)]
        trial.require_same(label, got, trial.baseline, f"{fix}add it to prewait_reads")
        late.append(name)
    if not late:
        return [Claim(claim, NOT_EXERCISED, "no other argument is a tensor on CUDA")]
    return [Claim(claim, HOLDS, f"equal bits with {', '.join(late)} written late")]
