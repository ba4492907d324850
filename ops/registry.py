"""Register contracts: each is checked against its op's schema before any pass can see it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping

from torch._ops import OpOverload

from compile_ext.ops import third_party
from compile_ext.ops.contract import Align, Gemm, Memory, OpContract, Pad
from compile_ext.ops.errors import ContractError

# What is wrong with a contract: (found, wanted, fix).
Fault = tuple[str, str, str]

_CONTRACTS: dict[OpOverload, OpContract] = {}
_MISFITS: dict[OpOverload, str] = {}


def register_contract(op: OpOverload, contract: OpContract) -> None:
    """Declare ``contract`` for ``op``; replaces an earlier declaration.

    Args:
        op: one overload, e.g. ``torch.ops.mylib.gemm.default``.

    Raises:
        ContractError: ``op`` is no overload, the contract names an argument that the schema lacks,
            or it declares an impossible alignment. Nothing is registered then.
    """
    if not isinstance(op, OpOverload):
        raise ContractError(
            f"register_contract({op})",
            f"a {type(op).__name__}",
            "one operator overload (torch._ops.OpOverload)",
            "pass the overload, for example torch.ops.mylib.gemm.default",
        )
    for found, wanted, fix in _faults(op, contract):
        raise ContractError(f"contract of {op}", found, wanted, fix)
    _CONTRACTS[op] = contract
    _MISFITS.pop(op, None)


def contract_of(op: OpOverload) -> OpContract | None:
    """The contract declared for ``op``, or else the one that this package has for an op of another
    package by that name (``third_party.py``), or None.
    """
    return _CONTRACTS.get(op) or _third_party(op)


def why_no_contract(op: OpOverload) -> str | None:
    """Why the contract that this package has for an op of another package is not used: the version
    that is installed has another schema. None for all other ops.
    """
    return _MISFITS.get(op)


def _third_party(op: OpOverload) -> OpContract | None:
    contract = third_party.CONTRACTS.get(f"{op._schema.name}.{op._overloadname}")
    if contract is None or op in _MISFITS:
        return None
    fault = next(_faults(op, contract), None)
    if fault is not None:
        _MISFITS[op] = f"the contract known for it does not fit: found {fault[0]}"
        return None
    _CONTRACTS[op] = contract
    return contract


def _faults(op: OpOverload, contract: OpContract) -> Iterator[Fault]:
    """Faults; the first is raised, and a later check relies on what the earlier ones saw to."""
    if not isinstance(contract, OpContract):
        yield f"a {type(contract).__name__}", "an OpContract", "pass OpContract(...)"
    yield from _type_faults(contract)
    yield from _name_faults(op, contract)
    if contract.gemm is not None:
        yield from _gemm_faults(contract.gemm, contract)
    for dim, align in contract.align.items():
        yield from _align_faults(dim, align, contract)
    for name, memory in contract.memory.items():
        yield from _memory_faults(name, memory, contract)
    returns = op._schema.returns
    if "n" in contract.align and (len(returns) != 1 or str(returns[0].type) != "Tensor"):
        yield (
            f"align['n'] for an op that returns {[str(r.type) for r in returns]}",
            "an op that returns one Tensor [..., n], of which the first n columns are kept",
            "leave 'n' out of align",
        )
    for name, predicate in contract.unread.items():
        if _is_written(op, name):
            yield (
                f"unread argument {name!r}, which the schema mutates",
                "an argument that the op does not write",
                "declare it in overwritten",
            )
        if not callable(predicate):
            yield (
                f"unread[{name!r}] = {predicate!r}",
                "a predicate that takes the call's arguments by name",
                f"write unread={{{name!r}: lambda **_: True}}",
            )
            continue
        arguments = {a.name: None for a in op._schema.arguments}
        try:
            inspect.signature(predicate).bind(**arguments)
        except TypeError as error:
            yield (
                f"unread[{name!r}], a predicate with {error}",
                f"one that takes the keywords {', '.join(arguments)}",
                "name those that it looks at, and add **_",
            )
    yield from _m1_faults(op, contract)


def _type_faults(contract: OpContract) -> Iterator[Fault]:
    if contract.gemm is not None and not isinstance(contract.gemm, Gemm):
        yield f"gemm = {contract.gemm!r}", "a Gemm", "write gemm=Gemm(a=..., b=...)"
    for field in ("align", "memory", "unread"):
        if not isinstance(getattr(contract, field), Mapping):
            yield f"{field} = {getattr(contract, field)!r}", "a dict", f"write {field}={{...}}"
    for field in ("overwritten", "prewait_reads"):
        value = getattr(contract, field)
        if not isinstance(value, tuple):
            yield f"{field} = {value!r}", "a tuple of argument names", f"write {field}=({value!r},)"
    if contract.compile_units is not None and not callable(contract.compile_units):
        yield (
            f"compile_units = {contract.compile_units!r}",
            "a callable (site, target, max_tokens) -> units",
            "pass a function, or leave it out",
        )
    for name, memory in contract.memory.items():
        if not isinstance(memory, Memory):
            fix = f"write memory={{{name!r}: Memory(address=16)}}"
            yield f"memory[{name!r}] = {memory!r}", "a Memory", fix
    for dim, align in contract.align.items():
        if not isinstance(align, Align):
            fix = f"write align={{{dim!r}: Align(16, pad={{...}})}}"
            yield f"align[{dim!r}] = {align!r}", "an Align", fix


def _name_faults(op: OpOverload, contract: OpContract) -> Iterator[Fault]:
    schema = {a.name: a for a in op._schema.arguments}
    tensors = [n for n, a in schema.items() if str(a.type) in ("Tensor", "Optional[Tensor]")]
    named = [("gemm", x) for x in (contract.gemm.arguments() if contract.gemm else ())]
    named += [(f"align[{d!r}].pad", x) for d, align in contract.align.items() for x in align.pad]
    for field in ("memory", "unread", "overwritten", "prewait_reads"):
        named += [(field, x) for x in getattr(contract, field)]
    for where, name in named:
        if name not in schema:
            yield (
                f"argument {name!r} in {where}, which the schema lacks",
                f"one of {', '.join(schema)}",
                f"name an argument of {op._schema}",
            )
        elif name not in tensors:
            yield (
                f"argument {name!r} in {where}, which is {schema[name].type}",
                f"a Tensor argument: {', '.join(tensors)}",
                "leave it out",
            )
    for name in contract.overwritten:
        if not _is_written(op, name):
            yield (
                f"overwritten argument {name!r}, which the schema does not mutate",
                "an argument declared like Tensor(a!)",
                f"declare it mutable in {op._schema}",
            )


def _is_written(op: OpOverload, name: str) -> bool:
    info = next(a.alias_info for a in op._schema.arguments if a.name == name)
    return info is not None and bool(info.is_write)


def _gemm_faults(gemm: Gemm, contract: OpContract) -> Iterator[Fault]:
    if gemm.layout not in ("nt", "nn"):
        fix = "say 'nt' for b [n, k] and 'nn' for b [k, n]"
        yield f"gemm layout {gemm.layout!r}", "'nt' or 'nn'", fix
    names = gemm.arguments()
    for name in names:
        if names.count(name) > 1:
            fix = "give each role its own argument"
            yield f"gemm names {name!r} {names.count(name)} times", "one role an argument", fix
    axis = gemm.m_axis
    is_axis = isinstance(axis, int) and not isinstance(axis, bool) and axis >= 0
    if axis is not None and not is_axis:
        fix = f"count the axes of {gemm.a!r} from 0, or leave it out"
        yield f"gemm with m_axis {axis!r}", "an integer of at least 0, or None", fix
    if gemm.a in contract.prewait_reads:
        yield (
            f"prewait_reads with {gemm.a!r}, the activation",
            "arguments that no kernel before this one writes",
            "leave it out",
        )


def _align_faults(dim: str, align: Align, contract: OpContract) -> Iterator[Fault]:
    where, gemm = f"align[{dim!r}]", contract.gemm
    if gemm is None:
        yield "align without gemm", "gemm=Gemm(a=..., b=...)", "say which arguments form the GEMM"
        return
    if dim not in ("n", "k"):
        yield where, "'n' or 'k'", "M changes with each call: pad it inside the op"
    if not _is_count(align.multiple):
        fix = "give the multiple in elements"
        yield f"{where} with multiple {align.multiple!r}", "an integer of at least 1", fix
    owners = (gemm.b,) if dim == "n" else (gemm.a, gemm.b)
    for owner in owners:
        if owner not in align.pad:
            yield (
                f"{where} without a pad value for {owner!r}, which has that dimension",
                f"pad values for {', '.join(owners)}",
                f"add {owner!r}: 0 to pad",
            )
    if dim == "n" and gemm.a in align.pad:
        fix = f"{gemm.a!r} is [m, k]: leave it out"
        yield f"{where} pads {gemm.a!r}", "arguments that have N", fix
    for name, pad in align.pads().items():
        yield from _pad_faults(f"{where} pads {name!r}", pad)


def _pad_faults(where: str, pad: Pad) -> Iterator[Fault]:
    if not _is_count(pad.block):
        fix = "give the block in elements"
        yield f"{where} with block {pad.block!r}", "an integer of at least 1", fix
    if pad.axis is not None and (isinstance(pad.axis, bool) or not isinstance(pad.axis, int)):
        fix = "give the axis as a number, or leave it out"
        yield f"{where} along axis {pad.axis!r}", "an integer or None", fix
    is_number = isinstance(pad.value, (int, float)) and not isinstance(pad.value, bool)
    if not is_number or not math.isfinite(pad.value):
        yield f"{where} with {pad.value!r}", "a finite number", "0 for data, 1.0 for scales"


def _memory_faults(name: str, memory: Memory, contract: OpContract) -> Iterator[Fault]:
    where = f"memory[{name!r}]"
    for field in ("address", "stride"):
        value = getattr(memory, field)
        if not _is_count(value):
            found = f"{where} with {field} {value!r}"
            yield found, "an integer of at least 1", "give bytes for address, elements for stride"
    if _is_count(memory.address) and 64 % memory.address:
        found = f"{where} with address {memory.address}"
        yield found, "a divisor of 64 bytes, which every allocation has", "ask for at most 64"
    if contract.gemm is None:
        fix = "say which arguments form the GEMM"
        yield f"{where} without gemm", "gemm=Gemm(a=..., b=...)", fix
    elif name == contract.gemm.a:
        yield f"{where}, the activation", "weights, scales and biases", "leave it out"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _m1_faults(op: OpOverload, contract: OpContract) -> Iterator[Fault]:
    variant = contract.m1_variant
    if variant is None:
        return
    if not isinstance(variant, OpOverload):
        found = f"m1_variant of type {type(variant).__name__}"
        yield found, "an operator overload", "pass e.g. torch.ops.mylib.gemm_m1.default"
        return
    if variant is op:
        yield f"m1_variant {op}, the op itself", "another op", "leave it out"
    if contract.gemm is None:
        found = "m1_variant without gemm"
        yield found, "gemm=Gemm(a=..., b=...)", "say which argument holds the M tokens"
    signatures = [[(a.name, str(a.type)) for a in o._schema.arguments] for o in (op, variant)]
    if signatures[0] != signatures[1]:
        yield (
            f"m1_variant {variant._schema}",
            f"the same arguments as {op._schema}",
            "give the variant the same schema",
        )
