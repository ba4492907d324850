"""From the sites of a manifest to the compile units that their calls can reach on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from compile_ext.manifest import Manifest, ManifestSite, NotCovered
from compile_ext.ops import cute_support, deep_gemm_operands, deep_gemm_support
from compile_ext.ops.call_site import Call, CallSite, NotReachable
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.define import PINNED, Kernel, OpDefinition, definition_of, own_arguments
from compile_ext.ops.device import Target, as_if_on
from compile_ext.ops.registry import contract_of
from compile_ext.ops.token_counts import limits
from compile_ext.ops.triton_compiler import TRITON


@dataclass(frozen=True)
class PlannedSite:
    """A site and what it needs.

    Args:
        site: of the manifest.
        kernels: which kernel runs for which M: ``(first, last, name)``, without gaps.
        keys: of its units.
    """

    site: ManifestSite
    kernels: tuple[tuple[int, int, str], ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Missing:
    """A compiler that is not here, so that other kernels run in the place of its own.

    Args:
        compiler: ``deep_gemm``, ``cute`` or ``triton``.
        reason: why it cannot be used, and what to do.
        ops: of the manifest, those that have a kernel of it.
    """

    compiler: str
    reason: str
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What has to be compiled.

    Args:
        units: none twice, those of few tokens first.
        sites: what each site needs of them.
        not_covered: what the units leave out, and why.
        missing: compilers that ops could use and that are not here.
    """

    units: tuple[CompileUnit, ...]
    sites: tuple[PlannedSite, ...]
    not_covered: tuple[NotCovered, ...]
    missing: tuple[Missing, ...] = ()


def plan(manifest: Manifest, target: Target, max_tokens: int) -> Plan:
    """The units that calls of up to ``max_tokens`` tokens can reach. Compiles nothing, and needs no
    GPU."""
    units: dict[str, CompileUnit] = {}
    sites, not_covered = [], dict.fromkeys(manifest.not_covered)
    for site in manifest.sites:
        if site.call.m[0] > max_tokens:
            reason = f"its calls have {site.call.m[0]} tokens or more, max_tokens is {max_tokens}"
            not_covered[NotCovered(_name(site.call), site.modules, reason)] = None
            continue
        try:
            kernels, found = _units_of(site.call, target, max_tokens)
            _check(found, units)
        except _UnknownOp as error:
            not_covered[NotCovered(_name(site.call), site.modules, str(error))] = None
            continue
        except Exception as error:  # a contract's own code: its fault costs its site alone
            reason = f"its kernels cannot be planned ({type(error).__name__}: {error})"
            not_covered[NotCovered(_name(site.call), site.modules, reason)] = None
            continue
        for unit in found:
            known = units.setdefault(unit.key, unit)
            if known.calls[0].m > unit.calls[0].m:
                units[unit.key] = unit
        sites.append(PlannedSite(site, kernels, tuple(x.key for x in found)))
    hot_first = sorted(units.values(), key=lambda x: (x.calls[0].m, x.compiler.name, x.kernel))
    missing = tuple(_missing(sites, target))
    return Plan(tuple(hot_first), tuple(sites), tuple(not_covered), missing)


def _check(found: tuple[Any, ...], known: Mapping[str, CompileUnit]) -> None:
    """Of a contract: what it gives must be units, and no unit's key another compiler's too."""
    for unit in found:
        if not isinstance(unit, CompileUnit):
            raise TypeError(f"compile_units gives a {type(unit).__name__}, wanted a CompileUnit")
        for name, value in (
            ("key", unit.key),
            ("kernel", unit.kernel),
            ("compiler.name", unit.compiler.name),
        ):
            if not isinstance(value, str) or not value.isprintable():
                raise TypeError(f"a unit has {name}={value!r}, wanted a printable str")
        if not isinstance(unit.seconds, int | float):
            raise TypeError(f"unit {unit.key} has seconds={unit.seconds!r}, wanted a number")
        if not unit.calls or not all(isinstance(call, Call) for call in unit.calls):
            raise TypeError(f"unit {unit.key} has calls={unit.calls!r}, wanted one Call or more")
        other = known.get(unit.key, unit).compiler.name
        if other != unit.compiler.name:
            raise ValueError(f"{unit.compiler.name}'s key {unit.key} is one of {other}'s too")


def _missing(sites: Iterable[PlannedSite], target: Target) -> Iterator[Missing]:
    kernels: dict[str, set[str]] = {}
    for planned in sites:
        call = planned.site.call
        definition = definition_of(call.overload)
        for kernel in definition.kernels if definition is not None else ():
            kernels.setdefault(kernel.name.split("_small_m")[0], set()).add(_name(call))
    why_not: dict[str, Callable[[], str | None]] = {
        "cute": cute_support.why_no_compiler,
        "deep_gemm": deep_gemm_support.why_not,
        "triton": lambda: TRITON.why_not(target),
    }
    for compiler, ask in why_not.items():
        wanted = deep_gemm_operands.CAPABILITY if compiler == "deep_gemm" else None
        if compiler in kernels and wanted in (None, target.capability):
            reason = ask()
            if reason is not None:
                yield Missing(compiler, reason, tuple(sorted(kernels[compiler])))


def _name(call: CallSite) -> str:
    return call.op.rpartition(".")[0]


class _UnknownOp(Exception):
    pass


def _units_of(
    site: CallSite, target: Target, max_tokens: int
) -> tuple[tuple[tuple[int, int, str], ...], tuple[CompileUnit, ...]]:
    try:
        op = site.overload
    except AttributeError as error:
        raise _UnknownOp(
            f"no module of this process registers {site.op}: import the one that does"
        ) from error
    definition, contract = definition_of(op), contract_of(op)
    if definition is None:
        if contract is None or contract.compile_units is None:
            return (), ()  # the manifest says so
        return (), tuple(contract.compile_units(site, target, max_tokens))
    ranges = tuple(_kernels_by_m(definition, site, target, max_tokens))
    found: dict[str, CompileUnit] = {}
    for low, high, kernel in ranges:
        for unit in kernel.compile_units(replace(site, m=(low, high)), target, max_tokens):
            found.setdefault(unit.key, unit)
    return tuple((low, high, k.name) for low, high, k in ranges), tuple(found.values())


def _kernels_by_m(
    definition: OpDefinition, site: CallSite, target: Target, max_tokens: int
) -> Iterator[tuple[int, int, Kernel]]:
    """The kernel that the op chooses for each M: asked where a choice can change, and where two
    answers differ, for the M at which they do."""
    low = max(1, site.m[0])
    high = max_tokens if site.m[1] is None else min(site.m[1], max_tokens)
    with as_if_on(target):
        fixed = site.fixed("meta")

        def choice(m: int) -> Kernel | None:
            try:
                arguments: dict[str, Any] = site.make(m, "meta", fixed)
            except NotReachable:
                return None
            pinned = arguments.pop(PINNED, None)
            return definition.kernel_for(*own_arguments(arguments), pinned=pinned)[0]

        asked = {m: choice(m) for m in _asked(definition, site, low, high)}
        start, current, last = None, None, None
        for m, kernel in asked.items():
            if kernel is None:
                continue
            if current is None:
                start, current = m, kernel
            elif kernel is not current:
                assert last is not None
                assert start is not None
                first = _first(choice, last, m, current)
                yield start, first - 1, current
                start, current = first, kernel
            last = m
        if current is not None and start is not None:
            yield start, high, current


def _asked(definition: OpDefinition, site: CallSite, low: int, high: int) -> list[int]:
    """Where a choice can change: at limits that kernels have, and those of the measured rows."""
    found = limits(low, high)
    try:
        ranges = definition.measured_ranges(own_arguments(site.make(low, "meta")))
    except NotReachable:
        ranges = None
    if ranges is not None:
        edges = {*ranges.firsts, *ranges.lasts}
        found |= {m for x in edges for m in (x - 1, x, x + 1) if low <= m <= high}
    return sorted(found)


def _first(choice: Any, low: int, high: int, kernel: Kernel) -> int:
    """The first M above ``low``, where ``kernel`` is chosen, at which it is not; at ``high`` it is
    not."""
    while high - low > 1:
        middle = (low + high) // 2
        chosen = choice(middle)
        low, high = (middle, high) if chosen is kernel or chosen is None else (low, middle)
    return high
