"""``check_contract``: run an op, and prove what its contract claims."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from compile_ext import find_op
from compile_ext.ops.contract import OpContract
from compile_ext.ops.errors import ContractError
from compile_ext.ops.registry import contract_of
from compile_ext.testing.arguments import Arguments, bind, on_cpu
from compile_ext.testing.claims.align import prove_align
from compile_ext.testing.claims.clean import prove_clean
from compile_ext.testing.claims.contents import prove_overwritten, prove_unread
from compile_ext.testing.claims.m1 import prove_m1_variant
from compile_ext.testing.claims.memory import prove_bounds, prove_memory
from compile_ext.testing.claims.prewait import prove_prewait_reads
from compile_ext.testing.process.isolated import Isolated
from compile_ext.testing.report import NOT_EXERCISED, Claim, ContractReport
from compile_ext.testing.trial import Trial

_LONGEST = 1_000_000  # seconds; the wait counts milliseconds in 32 bits
PROOFS = (
    prove_clean,  # first: all others compare with the clean run
    prove_unread,
    prove_overwritten,
    prove_align,
    prove_m1_variant,
    prove_bounds,
    prove_memory,
    prove_prewait_reads,
)


def check_contract(
    op: OpOverload,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    imports: Sequence[str] = (),
    timeout: float = 300.0,
) -> ContractReport:
    """Run ``op`` on ``inputs`` and on inputs that its contract says are as good, and compare.

    The op runs in a child process, without gradients; a crash there is an error here. Where it
    raises for inputs that are not aligned as the contract says, all runs are with aligned ones,
    padded as a pass pads them, and a note of the report says so.

    Args:
        op: an overload that has a contract.
        inputs: positional arguments in the order of the schema; or all arguments by schema name.
            Tensors keep their strides, their offsets and the memory that they share. Small ones are
            enough: the op runs ten to fifty times.
        imports: modules that define the op, for the child that runs CUDA ops.
        timeout: seconds that one run may take, and the start of the child (which imports torch for
            CUDA tensors).

    Returns:
        Every claim: it holds for these inputs, or is not exercised by them. Print it.

    Raises:
        ClaimError: a claim is false (with the argument, and the first element that differs).
        ContractError: the op has no contract, the inputs do not fit its schema, ``timeout`` is no
            such number; the child died or ran out of time (with the run).
        Exception: what the op raises for the inputs as they are (and, where they are not aligned,
            for aligned ones too).
    """
    where = f"check_contract({op})"
    contract = _contract(op, where)
    _refuse_timeout(timeout, where)
    caller = str(sys._getframe(1).f_globals.get("__name__", "__main__"))
    # Without the modes around the call: under a FakeTensorMode the copies would be fakes.
    with torch.no_grad(), _disable_current_modes():
        sources = find_op.sources(op, contract, imports, caller)
        return _proved(op, contract, bind(op, inputs, where), sources, timeout, where)


def _proved(
    op: OpOverload,
    contract: OpContract,
    bound: Arguments,
    sources: list[find_op.Source],
    timeout: float,
    where: str,
) -> ContractReport:
    arguments, devices = on_cpu(bound, where)
    ops = [x for x in (op, contract.m1_variant) if x is not None]
    fork = all(d == "cpu" for ds in devices.values() for d in ds)
    claims: list[Claim] = []
    with Isolated(where, ops, sources, fork=fork, seconds=timeout) as child:
        trial = Trial(op, contract, arguments, devices, child, where)
        for prove in PROOFS:
            claims += prove(trial)
        if not trial.gives_elements:
            claims = [_vacuous(c) for c in claims]
        claims += _nothing_to_run(contract)
        return ContractReport(str(op), tuple(claims), tuple(trial.notes), child.runs)


def _vacuous(claim: Claim) -> Claim:
    return Claim(claim.name, NOT_EXERCISED, "the op gives no elements for these inputs to compare")


def _nothing_to_run(contract: OpContract) -> list[Claim]:
    claims = []
    if contract.gemm is not None:
        why = "nothing to run: says only which argument is which"
        claims.append(Claim("gemm", NOT_EXERCISED, why))
    if contract.compile_units is not None:
        claims.append(Claim("compile_units", NOT_EXERCISED, "for the warmup: no call rests on it"))
    return claims


def _refuse_timeout(timeout: Any, where: str) -> None:
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= _LONGEST:
        raise ContractError(
            where,
            f"timeout={timeout!r}",
            f"a number of seconds above 0, up to {_LONGEST:_}",
            "pass the seconds that one run may take, for example timeout=300",
        )


def _contract(op: OpOverload, where: str) -> OpContract:
    if not isinstance(op, OpOverload):
        raise ContractError(
            where,
            f"a {type(op).__name__}",
            "one operator overload (torch._ops.OpOverload)",
            "pass the overload, for example torch.ops.mylib.gemm.default",
        )
    contract = contract_of(op)
    if contract is None:
        fix = f"compile_ext.register_contract({op}, compile_ext.OpContract(...))"
        raise ContractError(where, "an op without a contract", "an op that has one", fix)
    return contract
