"""The compile units of a kernel, from what its host code would launch for each number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile_ext.ops import launches
from compile_ext.ops.call_site import Call, CallSite, NotReachable
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target
from compile_ext.ops.token_counts import representatives

# Makes a call: gets the arguments by name, tensors of the device ``meta``.
Run = Callable[[dict[str, Any]], Any]


def traced_units(
    run: Run, site: CallSite, target: Target, max_tokens: int, kernel: str | None = None
) -> tuple[CompileUnit, ...]:
    """The units of the calls that a site can make, none twice, those of few tokens first.

    Args:
        run: makes a call; each Triton kernel that it launches, and each of this package's own, is
            a unit.
        kernel: the name of the kernel that ``run`` is, where the op has several.
    """
    low, high = site.m
    high = max_tokens if high is None else min(high, max_tokens)
    found: dict[str, CompileUnit] = {}
    with launches.recording(target) as noted:
        fixed = site.fixed("meta")
        for m in representatives(max(1, low), high):
            try:
                arguments = site.make(m, "meta", fixed)
            except NotReachable:
                continue
            noted.clear()
            run(arguments)
            for x in noted:
                if x.key not in found:
                    calls = (Call(site, m, kernel),)
                    found[x.key] = CompileUnit(
                        x.compiler, x.kernel, x.key, calls, x.made_from, x.seconds, x.how
                    )
    return tuple(found.values())
