"""``check_contract``: run an op, and prove what its contract claims."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from compile_ext.ops.contract import OpContract
from compile_ext.ops.errors import ContractError
from compile_ext.ops.registry import contract_of
from compile_ext.testing import find_op
from compile_ext.testing.arguments import bind, on_cpu
from compile_ext.testing.claims_align import prove_align
from compile_ext.testing.claims_clean import prove_clean
from compile_ext.testing.claims_overwritten import prove_overwritten
from compile_ext.testing.claims_unread import prove_unread
from compile_ext.testing.isolated import Isolated
from compile_ext.testing.report import Claim, ContractReport
from compile_ext.testing.trial import Trial

# The clean run comes first: all others are compared with it.
PROOFS = (prove_clean, prove_unread, prove_overwritten, prove_align)


def check_contract(
    op: OpOverload,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    imports: Sequence[str] = (),
    timeout: float = 300.0,
) -> ContractReport:
    """Run ``op`` on ``inputs`` and on inputs that its contract says are as good, and compare.

    The op runs in a child process, without gradients; a crash there is an error here.

    Args:
        op: an overload that has a contract.
        inputs: positional arguments in the order of the schema; or all arguments by schema name.
            Tensors keep their strides, their offsets and the memory that they share. Small ones are
            enough: the op runs some twenty to fifty times.
        imports: modules that define the op, for the child that runs CUDA ops.
        timeout: seconds that one run may take.

    Returns:
        Every claim, as proved for these inputs or as not exercised by them. Print it.

    Raises:
        ContractError: a claim is false (with the argument, and the first element that differs); the
            op has no contract, or the inputs do not fit its schema; the child died (with the run).
        Exception: what the op raises for the inputs as they are.
    """
    where = f"check_contract({op})"
    contract = _contract(op, where)
    arguments, devices = on_cpu(bind(op, inputs, where), where)
    caller = str(sys._getframe(1).f_globals.get("__name__", "__main__"))
    sources = [*find_op.sources(op, contract, imports), *find_op.sources(op, contract, [caller])]
    ops = [op] + [contract.m1_variant] * (contract.m1_variant is not None)
    fork = all(d == "cpu" for ds in devices.values() for d in ds)
    claims: list[Claim] = []
    with torch.no_grad(), Isolated(where, ops, sources, fork=fork, seconds=timeout) as child:
        trial = Trial(op, contract, arguments, devices, child, where)
        for prove in PROOFS:
            claims += prove(trial)
        return ContractReport(str(op), tuple(claims), tuple(trial.notes), child.runs)


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
