"""Define an op: schema, fake, kernels and contract in one call, and the dispatch between kernels.

``Library.define/impl/register_fake`` and not ``torch.library.custom_op``: 2.7 against 10.3 us a
call inside a compiled graph (torch 2.13, CPU, body ``x.clone()``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.library import Library, register_fake

from compile_ext.ops import checks, device_tables
from compile_ext.ops.call_site import CallSite
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.contract import Gemm, OpContract, m_of_gemm
from compile_ext.ops.device import Target
from compile_ext.ops.errors import GradError, KernelError, KernelUnavailable
from compile_ext.ops.registry import register_contract
from compile_ext.ops.traced_units import traced_units

NAMESPACE = "compile_ext"
# The argument that pins a kernel. Not "kernel": Inductor passes keywords on beside one of its own.
PINNED = "pinned"
# The argument that allows a kernel to read the contract's ``prewait_reads`` before its PDL wait.
PREFETCH = "prefetch"
# What an op gives: one tensor, or several where its schema says ``-> (Tensor, Tensor)``.
Result = torch.Tensor | tuple[torch.Tensor, ...]
_LIBRARY = Library(NAMESPACE, "DEF")


@dataclass(eq=False)
class Kernel:
    """One implementation of an op.

    Args:
        name: ``reference``, ``aten``, ``triton``, ``triton_small_m``, ``cute``, ``deep_gemm``,
            ``batch_invariant``.
        why_not: gets the call's arguments; the reason why it cannot run them, or None.
        run: computes the result, a new tensor or a tuple of them; gets the same arguments, already
            checked by the op. May raise KernelUnavailable before it has launched what counts.
        prefetches: whether ``run`` takes a keyword ``prefetch``. Where it is True, no kernel that
            may still be running writes what the contract names in ``prewait_reads``.
        compiles: whether ``run`` launches kernels that are compiled when they are first launched.
        failures: why it gave up in the middle of a call, by device.
    """

    name: str
    why_not: Callable[..., str | None]
    run: Callable[..., Result]
    prefetches: bool = False
    compiles: bool = True
    failures: dict[torch.device, str] = field(default_factory=dict)

    def compile_units(
        self, site: CallSite, target: Target, max_tokens: int
    ) -> tuple[CompileUnit, ...]:
        """What has to be compiled before it runs the calls of a site of up to ``max_tokens`` on
        ``target``, none twice. No GPU is needed to know."""
        if not self.compiles:
            return ()

        def run(arguments: dict[str, Any]) -> None:
            args = own_arguments(arguments)
            if self.why_not(*args) is None:  # as the dispatch asks
                self.launch(args, prefetch=arguments.get(PREFETCH, False))

        return traced_units(run, site, target, max_tokens, self.name)

    def give_up(self, device: torch.device, reason: str) -> None:
        """From now on this is why not, on this device. Costs the calls before it nothing."""
        asked = self.why_not
        self.failures[device] = reason
        self.why_not = lambda *args: reason if args[0].device == device else asked(*args)

    def launch(self, args: Sequence[Any], *, prefetch: bool) -> Result:
        """``run``, told about ``prefetch`` if it takes it."""
        return self.run(*args, prefetch=prefetch) if self.prefetches else self.run(*args)


def own_arguments(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a call's arguments by schema name, those that ``kernel_for`` and kernels take: without
    ``prefetch`` and ``pinned``."""
    return tuple(x for name, x in arguments.items() if name not in (PREFETCH, PINNED))


def never(*args: Any, **kwargs: Any) -> str | None:
    """The ``why_not`` of a kernel that always runs."""
    return None


@dataclass(frozen=True)
class OpDefinition:
    """What ``define_op`` made: the overload, its kernels in order of preference, and which
    arguments form the GEMM, if it is one."""

    overload: OpOverload
    kernels: tuple[Kernel, ...]
    gemm: Gemm | None = None

    @functools.cached_property
    def name(self) -> str:
        """Of the op, without the namespace."""
        return str(self.overload._schema.name).removeprefix(f"{NAMESPACE}::")

    @functools.cached_property
    def family(self) -> str:
        """The name under which the op is measured and pinned: of an M == 1 variant, the op's that
        it is one of."""
        return self.name.removesuffix("_m1")

    def kernel_for(self, *args: Any, pinned: str | None = None) -> tuple[Kernel, dict[str, str]]:
        """The kernel that runs these arguments, and why each one before it does not: the ``pinned``
        one, or that of a measured table, or the first of the tuple that can.

        Raises:
            KernelError: the op has no such kernel, or it cannot run these arguments.
        """
        if pinned is not None:
            return self._named(pinned, args), {}
        reasons: dict[str, str] = {}
        name = self._measured(args)
        if name is not None:
            fastest = self._find(name)
            reason = fastest.why_not(*args) if fastest else "the op has no such kernel"
            if fastest and reason is None:
                return fastest, self._slower[name]
            reasons[name] = f"measured as the fastest, but {reason}"
        for kernel in self.kernels:
            if kernel.name in reasons:
                continue
            reason = kernel.why_not(*args)
            if reason is None:
                return kernel, reasons
            reasons[kernel.name] = reason
        raise AssertionError(f"{self.overload} has no reference kernel")  # define_op sees to it

    def measured_ranges(self, args: tuple[Any, ...]) -> device_tables.Ranges | None:
        """The rows of this call's N and K, for all M, in the measured tables of its device. None
        where there are none, on the CPU among others."""
        if self.gemm is None:
            return None
        by_shape = device_tables.ranges_for(args[0])
        if not by_shape:
            return None
        shape = args[self._at[1]].shape  # the ops of this package take their weights as [n, k]
        n, k = shape[-2], shape[-1]
        if type(n) is not int or type(k) is not int:
            n, k = checks.known(n), checks.known(k)
        return by_shape.get((self.family, n, k))

    def _measured(self, args: tuple[Any, ...]) -> str | None:
        """The name that the tables have for this call; None where M is known only at run time."""
        ranges = self.measured_ranges(args)
        if ranges is None:
            return None
        a = args[self._at[0]]
        shape = a.shape
        if len(shape) == 2:
            m = shape[0]
        else:
            assert self.gemm is not None
            m = m_of_gemm(self.overload, self.gemm, a)
        if type(m) is not int:
            m = checks.known(m)
        return None if m is None else ranges.kernel(m)

    @functools.cached_property
    def _at(self) -> tuple[int, int]:
        """Positions of the activation and the weight among the arguments."""
        assert self.gemm is not None
        names = [x.name for x in self.overload._schema.arguments]
        return names.index(self.gemm.a), names.index(self.gemm.b)

    @functools.cached_property
    def _slower(self) -> dict[str, dict[str, str]]:
        """What is said of the kernels in front of one that a table prefers. Made once: it is on the
        path of every call."""
        names = [k.name for k in self.kernels]
        return {
            name: {other: f"{name} is measured as faster" for other in names[:i]}
            for i, name in enumerate(names)
        }

    def _find(self, name: str) -> Kernel | None:
        return next((k for k in self.kernels if k.name == name), None)

    def _named(self, name: str, args: tuple[Any, ...]) -> Kernel:
        kernel = self._find(name)
        if kernel is None:
            names = ", ".join(k.name for k in self.kernels)
            raise KernelError(self.name, f"kernel {name!r}", names, "name one of them, or none")
        reason = kernel.why_not(*args)
        if reason is not None:
            found = f"kernel {name!r}, which cannot run this call: {reason}"
            wanted = "a kernel that can"
            raise KernelError(self.name, found, wanted, "pin another one, or none")
        return kernel


_DEFINITIONS: dict[OpOverload, OpDefinition] = {}


def definition_of(op: OpOverload) -> OpDefinition | None:
    """The definition of an op of this package, None for any other op."""
    return _DEFINITIONS.get(op)


def why_reference(op: OpOverload, *args: Any, pinned: str | None = None) -> str | None:
    """Why an op of this package would run its reference for these arguments: of each kernel why it
    cannot. None where one can. A pass asks before it puts an op there: the reference is opaque to
    Inductor and unfused inside, so slower than what it would replace."""
    kernel, reasons = _DEFINITIONS[op].kernel_for(*args, pinned=pinned)
    if kernel.name != "reference":
        return None
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def definitions() -> tuple[OpDefinition, ...]:
    """All ops of this package."""
    return tuple(_DEFINITIONS.values())


def define_op(
    schema: str,
    *,
    check: Callable[..., None],
    fake: Callable[..., Result],
    kernels: tuple[Kernel, ...],
    contract: OpContract,
) -> OpOverload:
    """Register ``compile_ext::<schema>``, with a last argument ``str? pinned=None`` that pins a
    kernel by name, before it ``bool prefetch=False`` where a kernel prefetches, and return its
    overload.

    Args:
        check: raises a CompileExtError for arguments that the op refuses; runs in the fake (so that
            errors come at trace time where a fake can show them) and before every kernel.
        fake: gets checked arguments, returns empty tensors of the results' shapes, strides and
            dtypes.
        kernels: in order of preference, the reference among them, which always runs: what stands
            behind it runs only where a call names it.
    """
    if not any(k.name == "reference" and k.why_not is never for k in kernels):
        raise AssertionError(f"a kernel of {schema} must be the reference, which always runs")
    name = schema.split("(", 1)[0]
    prefetches = any(k.prefetches for k in kernels)
    more = f", bool {PREFETCH}=False" * prefetches + f", str? {PINNED}=None"
    pinnable = schema.replace(") ->", f"{more}) ->", 1)
    # compliant: fake, functional, no aliasing; torch.library.custom_op sets the same tag.
    _LIBRARY.define(pinnable, tags=(torch.Tag.pt2_compliant_tag,))
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    definition = OpDefinition(overload, kernels, contract.gemm)
    count = len(overload._schema.arguments) - 1 - prefetches
    defaults = (False, None) if prefetches else (None,)

    def checked(given: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool, str | None]:
        """The arguments, and the two that the dispatcher leaves out where they are the default."""
        args, extra = given[:count], given[count:]
        options: list[Any] = [*extra, *defaults[len(extra) :]]
        _refuse_grad(overload, args)
        check(*args)
        return args, bool(options[0]) if prefetches else False, options[-1]

    def run(*given: Any) -> Result:
        args, prefetch, pinned = checked(given)
        kernel = definition.kernel_for(*args, pinned=pinned)[0]
        device = args[0].device.type
        try:
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                # A reference is written in terms of torch.mm, which autocast would run in 16 bits.
                with torch.autocast(device, enabled=False):
                    return kernel.launch(args, prefetch=prefetch)
            return kernel.launch(args, prefetch=prefetch)
        except KernelUnavailable as error:
            kernel.give_up(args[0].device, str(error))
        return run(*given)  # the next kernel, or the error of a pinned one

    def run_fake(*given: Any) -> Result:
        args, _, pinned = checked(given)
        if pinned is not None:
            definition.kernel_for(*args, pinned=pinned)  # so that the error comes at trace time
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
    for argument, value in zip(op._schema.arguments, args, strict=False):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise GradError(
                op._schema.name.removeprefix(f"{NAMESPACE}::"),
                f"{argument.name} that requires grad",
                "inference: the op has no gradient",
                "call under torch.no_grad() or torch.inference_mode(), or detach() the tensor",
            )
