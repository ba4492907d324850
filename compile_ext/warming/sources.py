"""What a worker has to import before it can make the calls of a unit."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path

import torch

from compile_ext.find_op import Source, sources
from compile_ext.ops.call_site import find_overload
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target
from compile_ext.ops.registry import contract_of
from compile_ext.warming.messages import Request

_OURS = "compile_ext::"


def request_for(unit: CompileUnit, target: Target, folder: Path, lock_seconds: float) -> Request:
    """Raises any error of pickle, where the unit or its compiler cannot be sent."""
    ops = {call.site.op for call in unit.calls if not call.site.op.startswith(_OURS)}
    found, modules = _sources(sorted(ops))
    return Request(
        pickle.dumps((unit, target)),
        folder,
        tuple(sorted(ops)),
        tuple(map(str, torch.ops.loaded_libraries)),
        found,
        modules,
        lock_seconds,
    )


def _sources(ops: Iterable[str]) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """Modules that may define the ops, and those that say what they compile."""
    found: list[Source] = []
    modules: list[str] = []
    for name in ops:
        op = find_overload(name)
        contract = contract_of(op)
        if contract is not None:
            found += sources(op, contract, (), "__main__")
            modules.append(str(getattr(contract.compile_units, "__module__", "__main__")))
    ours = ("__main__", "compile_ext")
    return tuple(found), tuple(x for x in dict.fromkeys(modules) if x.split(".")[0] not in ours)
