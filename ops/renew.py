"""Find a compile unit anew in another process than it was planned in."""

from __future__ import annotations

from dataclasses import replace

from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.define import definition_of
from compile_ext.ops.device import Target
from compile_ext.ops.registry import contract_of


def renewed(unit: CompileUnit, target: Target) -> CompileUnit:
    """The unit with its ``how``, as this process finds it for the unit's call.

    Raises:
        LookupError: its call needs another one here: a source or a release differs.
    """
    if unit.how is not None:
        return unit
    call = unit.calls[0]
    site = replace(call.site, m=(call.m, call.m))
    op = site.overload
    definition, contract = definition_of(op), contract_of(op)
    if definition is not None:
        kernel = next(k for k in definition.kernels if k.name == call.kernel)
        units = kernel.compile_units(site, target, call.m)
    elif contract is not None and contract.compile_units is not None:
        units = contract.compile_units(site, target, call.m)
    else:
        units = ()
    found = next((x for x in units if x == unit), None)
    if found is None:
        raise LookupError(f"{site.op} needs another kernel here than where it was planned")
    return found
