"""Contracts: what an operator declares about itself, once, for every pass and for the warmup.

A contract belongs to one operator overload and is looked up by it, for the ops of this package and
for third-party ops alike. All names in a contract are argument names of the op's schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from compile_ext.ops.compile_unit import CompileUnits
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
        m_axis: the axis of ``a`` that holds M; None: all leading dimensions together. The others
            are batches, each with its own matrices.
    """

    a: str
    b: str
    layout: Layout = "nt"
    scale_a: str | None = None
    scale_b: str | None = None
    bias: str | None = None
    m_axis: int | None = None

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


@dataclass(frozen=True, eq=False)
class Align:
    """A GEMM dimension must be a multiple of ``multiple`` elements for the fast kernels.

    Args:
        multiple: elements, at least 1.
        pad: for each argument that has this dimension, the pad value (a number) or a :class:`Pad`.
            An argument that is None in a call, or a scale with one element, is left as it is.
    """

    multiple: int
    pad: Mapping[str, float | Pad] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _freeze(self, "pad")

    def pads(self) -> dict[str, Pad]:
        return {k: v if isinstance(v, Pad) else Pad(v) for k, v in self.pad.items()}


@dataclass(frozen=True)
class Memory:
    """Where an argument must lie for the fast kernels.

    Args:
        address: its address is a multiple of this, in bytes: 1 to 64, a power of two.
        stride: its strides other than 1 are multiples of this, in elements.
    """

    address: int = 1
    stride: int = 1


@dataclass(frozen=True, eq=False)
class OpContract:
    """What an op declares. Every field may be left out; a pass uses what is there.

    Args:
        gemm: the arguments that form the GEMM. Without it the op is no GEMM site.
        align: for ``"n"`` and ``"k"``, the multiple that the fast kernels need and how each
            argument is padded. The op must then compute the same numbers in the first n columns.
        memory: for weights, scales and biases, where they must lie. A parameter that does not is
            copied once.
        unread: ``{argument: predicate}``. The predicate gets all arguments of the call by schema
            name, tensors as fakes (no data), and says whether the op leaves the argument unread.
        overwritten: mutable arguments that the op overwrites in full without reading them.
        prewait_reads: arguments that a kernel may read before its PDL wait (never an activation).
        m1_variant: the overload with the same schema to call when M is statically 1.
        compile_units: ``(site, target, max_tokens) -> units``: what has to be compiled for a site.
    """

    gemm: Gemm | None = None
    align: Mapping[str, Align] = field(default_factory=dict)
    memory: Mapping[str, Memory] = field(default_factory=dict)
    unread: Mapping[str, Predicate] = field(default_factory=dict)
    overwritten: tuple[str, ...] = ()
    prewait_reads: tuple[str, ...] = ()
    m1_variant: OpOverload | None = None
    compile_units: CompileUnits | None = None

    def __post_init__(self) -> None:
        _freeze(self, "align")
        _freeze(self, "memory")
        _freeze(self, "unread")


def _freeze(owner: Any, name: str) -> None:
    """A registered contract was checked: it must not change through the dict it was made from."""
    value = getattr(owner, name)
    if isinstance(value, Mapping):
        object.__setattr__(owner, name, MappingProxyType(dict(value)))


def is_unread(
    op: OpOverload, contract: OpContract, name: str, arguments: Mapping[str, Any]
) -> bool:
    """Whether a call leaves the argument ``name`` unread, as the contract's predicate says.

    Args:
        arguments: all arguments of the call by schema name, tensors as fakes.

    Raises:
        ContractError: the predicate raises, or gives something else than a bool.
    """
    where = f"unread[{name!r}] of the contract of {op}"
    wanted = "True or False for the call's arguments by name"
    try:
        says = contract.unread[name](**arguments)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise ContractError(where, found, wanted, "mend the predicate") from error
    if not isinstance(says, bool):
        found = f"a {type(says).__name__}"
        raise ContractError(where, found, wanted, "return a bool; fakes hold no data to look at")
    return says


def is_optional(op: OpOverload, name: str) -> bool:
    """Whether the schema says ``Tensor?``. Never by trying: None for a plain Tensor seems to work
    with a Python kernel, and is wrong.
    """
    argument = next(a for a in op._schema.arguments if a.name == name)
    return isinstance(argument.type, torch.OptionalType)


def m_of(a: torch.Tensor) -> int | torch.SymInt:
    """M of an activation ``[..., k]``: the product of all dimensions but the last."""
    m: int | torch.SymInt = 1
    for size in a.shape[:-1]:
        m = m * size
    return m


def m_of_gemm(op: OpOverload, gemm: Gemm, a: torch.Tensor) -> int | torch.SymInt:
    """M of the activation of a call of ``op``, as its contract's ``m_axis`` says.

    Raises:
        ContractError: ``a`` has no such axis in front of k.
    """
    if gemm.m_axis is None:
        return m_of(a)
    if gemm.m_axis + 1 >= a.dim():
        where = f"m_axis {gemm.m_axis} of the contract of {op}"
        found = f"{gemm.a} of shape {list(a.shape)}"
        raise ContractError(where, found, "an axis in front of k", "mend m_axis")
    return a.shape[gemm.m_axis]
