"""Contracts: what an operator declares about itself, once, for every pass and for the warmup.

A contract belongs to one operator overload and is looked up by it, for the ops of this package and
for third-party ops alike. All names in a contract are argument names of the op's schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from compile_ext.ops.errors import ContractError

Layout = Literal["nt", "nn"]
Predicate = Callable[..., bool]


@dataclass(frozen=True)
class Gemm:
    """Which arguments form the product ``D [m, n] = A [m, k] @ B``.

    Args:
        a: the activation, ``[..., m, k]``.
        b: the weight; ``[n, k]`` for layout ``nt`` (as checkpoints store it), ``[k, n]`` for
            ``nn``.
        layout: ``nt`` or ``nn``.
        scale_a, scale_b, bias: the arguments of that role, or None where the op has none.
    """

    a: str
    b: str
    layout: Layout = "nt"
    scale_a: str | None = None
    scale_b: str | None = None
    bias: str | None = None

    def arguments(self) -> tuple[str, ...]:
        return tuple(x for x in (self.a, self.b, self.scale_a, self.scale_b, self.bias) if x)


@dataclass(frozen=True)
class Pad:
    """How one argument grows when a GEMM dimension is padded.

    Args:
        value: what the new elements hold.
        axis: which axis of the argument grows; None finds the one whose size fits the dimension.
        block: elements of the GEMM dimension that one element of the argument stands for (128 for
            the scale of a 128x128 block).
    """

    value: float
    axis: int | None = None
    block: int = 1


@dataclass(frozen=True)
class Align:
    """A GEMM dimension must be a multiple of ``multiple`` elements for the fast kernels.

    Args:
        multiple: elements, at least 1.
        pad: for each argument that has this dimension, the pad value (a number) or a :class:`Pad`.
            An argument that is None in a call, or a scale with one element, is left as it is.
    """

    multiple: int
    pad: Mapping[str, float | Pad] = field(default_factory=dict)

    def pads(self) -> dict[str, Pad]:
        return {k: v if isinstance(v, Pad) else Pad(v) for k, v in self.pad.items()}


@dataclass(frozen=True)
class OpContract:
    """What an op declares. Every field may be left out; a pass uses what is there.

    Args:
        gemm: the arguments that form the GEMM. Without it the op is no GEMM site.
        align: for ``"n"`` and ``"k"``, the multiple that the fast kernels need and how each
            argument is padded. The op must then compute the same numbers in the first n columns.
        unread: ``{argument: predicate}``. The predicate gets all arguments of the call by schema
            name, tensors as fakes (no data), and says whether the op leaves the argument unread.
        overwritten: mutable arguments that the op overwrites in full without reading them.
        prewait_reads: arguments that a kernel may read before its PDL wait (never an activation).
        m1_variant: the overload with the same schema to call when M is statically 1.
        compile_units: ``(site, target, max_tokens) -> units``: what has to be compiled for a site.
    """

    gemm: Gemm | None = None
    align: Mapping[str, Align] = field(default_factory=dict)
    unread: Mapping[str, Predicate] = field(default_factory=dict)
    overwritten: tuple[str, ...] = ()
    prewait_reads: tuple[str, ...] = ()
    m1_variant: OpOverload | None = None
    compile_units: Callable[..., Any] | None = None


_CONTRACTS: dict[OpOverload, OpContract] = {}


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
            found=f"a {type(op).__name__}",
            wanted="one operator overload (torch._ops.OpOverload)",
            fix="pass the overload, for example torch.ops.mylib.gemm.default",
        )
    _check_names(op, contract)
    _check_align(op, contract)
    _check_m1_variant(op, contract)
    _CONTRACTS[op] = contract


def contract_of(op: OpOverload) -> OpContract | None:
    """The contract declared for ``op``, or None."""
    return _CONTRACTS.get(op)


def _refuse(op: OpOverload, found: str, wanted: str, fix: str) -> ContractError:
    return ContractError(f"contract of {op}", found=found, wanted=wanted, fix=fix)


def _check_names(op: OpOverload, contract: OpContract) -> None:
    schema = {a.name: a for a in op._schema.arguments}
    named: list[tuple[str, str]] = []
    if contract.gemm:
        named += [("gemm", x) for x in contract.gemm.arguments()]
        if contract.gemm.layout not in ("nt", "nn"):
            raise _refuse(
                op, f"gemm layout {contract.gemm.layout!r}", "'nt' or 'nn'",
                "say 'nt' for b [n, k] and 'nn' for b [k, n]",
            )  # fmt: skip
    for dim, align in contract.align.items():
        if not isinstance(align, Align):
            raise _refuse(
                op, f"align[{dim!r}] = {align!r}", "an Align",
                f"write align={{{dim!r}: Align(16, pad={{...}})}}",
            )  # fmt: skip
    named += [(f"align[{d!r}].pad", x) for d, al in contract.align.items() for x in al.pad]
    named += [("unread", x) for x in contract.unread]
    named += [("overwritten", x) for x in contract.overwritten]
    named += [("prewait_reads", x) for x in contract.prewait_reads]
    tensors = [n for n, a in schema.items() if "Tensor" in str(a.type)]
    for where, name in named:
        if name not in schema:
            raise _refuse(
                op, f"argument {name!r} in {where}, which the schema lacks",
                f"one of {', '.join(schema)}", f"name an argument of {op._schema}",
            )  # fmt: skip
        if name not in tensors:
            raise _refuse(
                op, f"argument {name!r} in {where}, which is {schema[name].type}",
                f"a Tensor argument: {', '.join(tensors)}", "leave it out",
            )  # fmt: skip
    for name, predicate in contract.unread.items():
        if not callable(predicate):
            raise _refuse(
                op, f"unread[{name!r}] = {predicate!r}",
                "a predicate that takes the call's arguments by name",
                f"write unread={{{name!r}: lambda **_: True}}",
            )  # fmt: skip
    if contract.gemm and contract.gemm.a in contract.prewait_reads:
        raise _refuse(
            op, f"prewait_reads with {contract.gemm.a!r}, the activation",
            "arguments that no kernel before this one writes", "leave it out",
        )  # fmt: skip
    for name in contract.overwritten:
        info = schema[name].alias_info
        if info is None or not info.is_write:
            raise _refuse(
                op, f"overwritten argument {name!r}, which the schema does not mutate",
                "an argument declared like Tensor(a!)", f"declare it mutable in {op._schema}",
            )  # fmt: skip


def _check_align(op: OpOverload, contract: OpContract) -> None:
    if contract.align and contract.gemm is None:
        raise _refuse(op, "align without gemm", "gemm=Gemm(a=..., b=...)", "say which arguments form the GEMM")  # fmt: skip
    for dim, align in contract.align.items():
        where = f"align[{dim!r}]"
        if dim not in ("n", "k"):
            raise _refuse(
                op, f"{where}", "'n' or 'k'", "M changes with each call: pad it inside the op"
            )
        if isinstance(align.multiple, bool) or not isinstance(align.multiple, int) or align.multiple < 1:  # fmt: skip
            raise _refuse(op, f"{where} with multiple {align.multiple!r}", "an integer of at least 1", "give the multiple in elements")  # fmt: skip
        assert contract.gemm is not None
        owners = (contract.gemm.b,) if dim == "n" else (contract.gemm.a, contract.gemm.b)
        for owner in owners:
            if owner not in align.pad:
                raise _refuse(
                    op, f"{where} without a pad value for {owner!r}, which has that dimension",
                    f"pad values for {', '.join(owners)}", f"add {owner!r}: 0 to pad",
                )  # fmt: skip
        if dim == "n" and contract.gemm.a in align.pad:
            raise _refuse(op, f"{where} pads {contract.gemm.a!r}", "arguments that have N", f"{contract.gemm.a!r} is [m, k]: leave it out")  # fmt: skip
        for name, pad in align.pads().items():
            if isinstance(pad.block, bool) or not isinstance(pad.block, int) or pad.block < 1:
                raise _refuse(op, f"{where} pads {name!r} with block {pad.block!r}", "an integer of at least 1", "give the block in elements")  # fmt: skip
            if not isinstance(pad.value, (int, float)) or math.isnan(pad.value):
                raise _refuse(op, f"{where} pads {name!r} with {pad.value!r}", "a number that is not NaN", "0 for data, 1.0 for scales")  # fmt: skip


def _check_m1_variant(op: OpOverload, contract: OpContract) -> None:
    variant = contract.m1_variant
    if variant is None:
        return
    if not isinstance(variant, OpOverload):
        raise _refuse(
            op,
            f"m1_variant of type {type(variant).__name__}",
            "an operator overload",
            "pass e.g. torch.ops.mylib.gemm_m1.default",
        )
    if contract.gemm is None:
        raise _refuse(
            op,
            "m1_variant without gemm",
            "gemm=Gemm(a=..., b=...)",
            "say which argument holds the M tokens",
        )

    def signature(o: OpOverload) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in o._schema.arguments]

    if signature(variant) != signature(op):
        raise _refuse(
            op,
            f"m1_variant {variant._schema}",
            f"the same arguments as {op._schema}",
            "give the variant the same schema",
        )


def m_of(a: torch.Tensor) -> int | torch.SymInt:
    """M of an activation ``[..., k]``: the product of all dimensions but the last."""
    m: int | torch.SymInt = 1
    for size in a.shape[:-1]:
        m = m * size
    return m
