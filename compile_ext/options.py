"""Read and check the options of ``torch.compile(..., backend="compile_ext", options={...})``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compile_ext.ops import batch_invariant
from compile_ext.ops.define import definitions
from compile_ext.ops.errors import OptionError
from compile_ext.passes import PASS_NAMES

PREFIX = "compile_ext."
DISABLE_VARIABLE = "COMPILE_EXT_DISABLE"
INNERS = ("inductor", "aot_eager", "eager")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_INDUCTOR_PDL = "triton.enable_pdl"
_WHERE = "torch.compile(backend='compile_ext')"
OWN_OPTIONS = {
    "compile_ext.batch_invariant": "True: a token gets the same bits from our ops whatever M is",
    "compile_ext.bf16_router": "True: a router that the model computes in float32 multiplies"
    " bfloat16, and adds in float32",
    "compile_ext.disable": "a list of passes to leave out",
    "compile_ext.check": "True: on the first call, compare the rewritten graph with the original",
    "compile_ext.inner": f"what compiles the rewritten graph: {', '.join(INNERS)}",
    "compile_ext.kernels": 'a dict of ops and the kernel that runs them: {"scaled_mm": "triton"}',
    "compile_ext.memory_budget": "bytes for what is computed from weights once (default: pads, and"
    " other results up to 1/8 of the weights)",
    "compile_ext.pdl": "False: no kernel is launched before the one in front of it has ended",
    "compile_ext.poison": "True: what an op does not read or overwrites is NaN, so that a false"
    " contract shows",
    "compile_ext.rehome": "False: weights keep their address, and a padded one is held twice",
    "compile_ext.mode": f"the mode, which torch refuses beside options: {', '.join(MODES)}",
}


@dataclass(frozen=True)
class Options:
    """The options of one compilation.

    Args:
        disable: names of passes that do not run (option and ``COMPILE_EXT_DISABLE``,
            comma-separated).
        check: compare the original and the rewritten graph on the first call.
        inner: what compiles the rewritten graph.
        kernels: for an op, the one kernel that may run its calls; with batch_invariant, that one
            for each op that has it.
        batch_invariant: whether no op may choose by M.
        bf16_router: whether a router in float32 may multiply bfloat16.
        memory_budget: bytes for derived constants, or None for the default.
        pdl: whether kernels may be launched before the one in front has ended (programmatic
            dependent launch).
        poison: whether what an op does not read, or overwrites, is NaN.
        rehome: whether a parameter may move into its padded buffer.
        inductor: Inductor's config patches, from the mode and from the options without our prefix.
    """

    disable: frozenset[str] = frozenset()
    check: bool = False
    inner: str = "inductor"
    memory_budget: int | None = None
    pdl: bool = True
    poison: bool = False
    rehome: bool = True
    batch_invariant: bool = False
    bf16_router: bool = False
    kernels: dict[str, str] = field(default_factory=dict)
    inductor: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(mode: str | None = None, options: Mapping[str, Any] | None = None) -> Options:
        """Raises OptionError for an unknown option, pass, mode or inner compiler, listing the valid
        ones.
        """
        if options is not None and not isinstance(options, Mapping):
            raise _bad("options", options, "a dict", "write options={...}")
        for name in options or {}:
            if not isinstance(name, str):
                raise _bad("options", options, "a dict with text keys", f"write {str(name)!r}")
        own = {k: v for k, v in (options or {}).items() if k.startswith(PREFIX)}
        rest = {k: v for k, v in (options or {}).items() if not k.startswith(PREFIX)}
        for name in own:
            if name not in OWN_OPTIONS:
                raise _unknown("option", name, OWN_OPTIONS)
        budget = own.get("compile_ext.memory_budget")
        if budget is not None and (type(budget) is not int or budget < 0):
            raise _bad("compile_ext.memory_budget", budget, "bytes, 0 or more", "write e.g. 2**30")
        inner = own.get("compile_ext.inner", "inductor")
        if inner not in INNERS:
            raise _unknown("compile_ext.inner", inner, INNERS)
        mode = own.get("compile_ext.mode", mode)
        if mode is not None and mode not in MODES:
            raise _unknown("mode", mode, MODES)
        if inner != "inductor" and (rest or mode not in (None, "default")):
            given = sorted(rest) or f"mode {mode!r}"
            raise OptionError(
                _WHERE,
                f"compile_ext.inner = {inner!r} with {given}",
                "Inductor's options and modes only with inner='inductor'",
                "leave one of the two out",
            )
        pdl = _flag(own, "compile_ext.pdl", True)
        invariant = _flag(own, "compile_ext.batch_invariant", False)
        return Options(
            disable=_disabled(own.get("compile_ext.disable", ())),
            check=_flag(own, "compile_ext.check", False),
            inner=inner,
            memory_budget=budget,
            pdl=pdl,
            poison=_flag(own, "compile_ext.poison", False),
            rehome=_flag(own, "compile_ext.rehome", True),
            batch_invariant=invariant,
            bf16_router=_flag(own, "compile_ext.bf16_router", False),
            kernels=_kernels(own.get("compile_ext.kernels", {}), invariant),
            inductor=_inductor(mode, rest, pdl) if inner == "inductor" else {},
        )

    def why_no_pdl(self) -> str | None:
        """Why none of our kernels may be launched before the one in front has ended, or None."""
        if not self.pdl:
            return "compile_ext.pdl is False"
        if self.inner != "inductor":
            return None
        from torch._inductor import config

        if self.inductor.get(_INDUCTOR_PDL, config.triton.enable_pdl):
            return "triton.enable_pdl: kernels that Inductor launches early may not wait"
        return None


def _flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise _bad(name, value, "True or False", f"write {not default}")
    return value


def _disabled(value: Any) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _bad("compile_ext.disable", value, "a list of pass names", f"write [{value!r}]")
    value = list(value)
    if not all(isinstance(name, str) for name in value):
        raise _bad("compile_ext.disable", value, "a list of pass names", "name each pass as text")
    names = set(value)
    names |= {n.strip() for n in os.environ.get(DISABLE_VARIABLE, "").split(",") if n.strip()}
    for name in names:
        if name not in PASS_NAMES:
            raise _unknown(f"pass in compile_ext.disable or {DISABLE_VARIABLE}", name, PASS_NAMES)
    return frozenset(names)


def _kernels(value: Any, invariant: bool) -> dict[str, str]:
    name = "compile_ext.kernels"
    if not isinstance(value, Mapping):
        raise _bad(name, value, "a dict of ops and kernels", 'write e.g. {"scaled_mm": "aten"}')
    kernels = {d.name: [k.name for k in d.kernels] for d in definitions()}
    for op, kernel in value.items():
        if op not in kernels:
            raise _unknown(f"op in {name}", op, kernels)
        if kernel not in kernels[op]:
            raise _unknown(f"kernel of {op} in {name}", kernel, kernels[op])
    forced = {op for op in kernels if batch_invariant.NAME in kernels[op]} if invariant else set()
    for op in sorted(forced.intersection(value)):
        if value[op] != batch_invariant.NAME:
            wanted = f"for {op} one of the two: compile_ext.batch_invariant names its kernel"
            raise _bad(name, value, wanted, f"leave {op!r} out of {name}")
    return {**value, **dict.fromkeys(sorted(forced), batch_invariant.NAME)}


def _inductor(mode: str | None, options: dict[str, Any], pdl: bool) -> dict[str, Any]:
    if mode in (None, "default") and not options and pdl:
        return {}
    from torch._inductor import config, list_mode_options

    patches: dict[str, Any] = {}
    if mode not in (None, "default"):
        patches.update(list_mode_options(mode))
    known = config.get_config_copy()
    for name, value in options.items():
        attribute = name.replace("-", "_")
        if attribute not in known:
            raise _unknown("Inductor option", name, [*OWN_OPTIONS, *known])
        wanted = type(known[attribute])
        if (
            known[attribute] is not None
            and wanted in (bool, int, str)
            and not isinstance(value, wanted)
        ):
            raise _bad(name, value, wanted.__name__, f"pass a {wanted.__name__}")
        patches[attribute] = value
    if not pdl and patches.setdefault(_INDUCTOR_PDL, False):
        raise _bad(_INDUCTOR_PDL, True, "False with compile_ext.pdl = False", "leave one out")
    return patches


def _unknown(what: str, name: object, valid: Iterable[str]) -> OptionError:
    valid = list(valid)
    close = difflib.get_close_matches(str(name), valid, n=3)
    if valid[: len(OWN_OPTIONS)] == list(OWN_OPTIONS):
        own = ", ".join(f"{option} ({meaning})" for option, meaning in OWN_OPTIONS.items())
        wanted = f"{own}, or a key of torch._inductor.config"
    else:
        wanted = f"one of {', '.join(valid)}"
    fix = f"did you mean {' or '.join(close)}?" if close else "correct the name or leave it out"
    return OptionError(_WHERE, f"unknown {what} {name!r}", wanted, fix)


def _bad(name: str, value: object, wanted: str, fix: str) -> OptionError:
    return OptionError(_WHERE, f"{name} = {value!r}", wanted, fix)
