"""Define an op: schema, fake, kernels and contract in one call, and the dispatch between kernels.

``Library.define/impl/register_fake`` and not ``torch.library.custom_op``: 2.7 against 10.3 us a
call inside a compiled graph (torch 2.13, CPU, body ``x.clone()``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.library import Library, register_fake

from compile_ext.ops.contract import OpContract
from compile_ext.ops.errors import GradError
from compile_ext.ops.registry import register_contract

NAMESPACE = "compile_ext"
# What an op gives: one tensor, or several where its schema says ``-> (Tensor, Tensor)``.
Result = torch.Tensor | tuple[torch.Tensor, ...]
_LIBRARY = Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op.

    Args:
        name: ``reference``, ``aten``, ``triton``, ``triton_small_m``, ``cute``, ``deep_gemm``.
        why_not: gets the call's arguments; the reason why it cannot run them, or None.
        run: computes the result, a new tensor or a tuple of them; gets the same arguments, already
            checked by the op.
    """

    name: str
    why_not: Callable[..., str | None]
    run: Callable[..., Result]


def never(*args: Any, **kwargs: Any) -> str | None:
    """The ``why_not`` of a kernel that always runs."""
    return None


@dataclass(frozen=True)
class OpDefinition:
    """What ``define_op`` made: the overload and its kernels in order of preference."""

    overload: OpOverload
    kernels: tuple[Kernel, ...]

    def kernel_for(self, *args: Any) -> tuple[Kernel, dict[str, str]]:
        """The first kernel that can run these arguments, and why each earlier one cannot."""
        reasons: dict[str, str] = {}
        for kernel in self.kernels:
            reason = kernel.why_not(*args)
            if reason is None:
                return kernel, reasons
            reasons[kernel.name] = reason
        raise AssertionError(f"{self.overload} has no reference kernel")  # define_op sees to it


_DEFINITIONS: dict[OpOverload, OpDefinition] = {}


def definition_of(op: OpOverload) -> OpDefinition | None:
    """The definition of an op of this package, None for any other op."""
    return _DEFINITIONS.get(op)


def define_op(
    schema: str,
    *,
    check: Callable[..., None],
    fake: Callable[..., Result],
    kernels: tuple[Kernel, ...],
    contract: OpContract,
) -> OpOverload:
    """Register ``compile_ext::<schema>`` and return its overload.

    Args:
        check: raises a CompileExtError for arguments that the op refuses; runs in the fake (so that
            errors come at trace time where a fake can show them) and before every kernel.
        fake: gets checked arguments, returns empty tensors of the results' shapes, strides and
            dtypes.
        kernels: in order of preference; the last is the reference and always runs.
    """
    if kernels[-1].name != "reference" or kernels[-1].why_not is not never:
        raise AssertionError(f"the last kernel of {schema} must be the reference")
    name = schema.split("(", 1)[0]
    # compliant: fake, functional, no aliasing; torch.library.custom_op sets the same tag.
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    definition = OpDefinition(overload, kernels)

    def run(*args: Any) -> Result:
        _refuse_grad(overload, args)
        check(*args)
        kernel = definition.kernel_for(*args)[0]
        device = args[0].device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            # A reference is written in terms of torch.mm, which autocast would run in 16 bits.
            with torch.autocast(device, enabled=False):
                return kernel.run(*args)
        return kernel.run(*args)

    def run_fake(*args: Any) -> Result:
        _refuse_grad(overload, args)
        check(*args)
        return fake(*args)

    # One kernel for all devices: the choice between implementations is `kernel_for`, which can say
    # why.
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"{NAMESPACE}::{name}", run_fake, lib=_LIBRARY)
    register_contract(overload, contract)
    _DEFINITIONS[overload] = definition
    return overload


def _refuse_grad(op: OpOverload, args: tuple[Any, ...]) -> None:
    """Raise when autograd would record the call: without a formula the gradient would be silently
    lost.
    """
    if not torch.is_grad_enabled():
        return
    for argument, value in zip(op._schema.arguments, args, strict=True):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise GradError(
                op._schema.name.removeprefix(f"{NAMESPACE}::"),
                f"{argument.name} that requires grad",
                "inference: the op has no gradient",
                "call under torch.no_grad() or torch.inference_mode(), or detach() the tensor",
            )
