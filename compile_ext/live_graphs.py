"""The compiled graphs of one model that Dynamo still holds, and the module paths of what is in
them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn

from compile_ext import records
from compile_ext.backend import compile_ext_backend
from compile_ext.bindings import Binding
from compile_ext.ops import device
from compile_ext.ops.device import Target
from compile_ext.ops.errors import NotCompiledError
from compile_ext.options import PREFIX, Options
from compile_ext.passes.report import Entry
from compile_ext.records import GraphRecord
from compile_ext.tensors import handed, names_of, original, roots_of


def look(model: Any, /, *args: Any, **kwargs: Any) -> None:
    """Run the model once, compiled as the user compiles it but with inner ``eager``, to look at its
    graphs: no kernel is compiled. What it writes (a KV cache) is written."""
    how = compiled_with(model)
    own = _own_options(how.pop("mode", None), how.pop("options", None))
    look: Any = _backend(device.target(), json.dumps(own, sort_keys=True, default=dict))
    compiled: Any = torch.compile(original(model), backend=look, **how)
    compiled(*args, **kwargs)


def compiled_with(model: Any) -> dict[str, Any]:
    """What ``torch.compile(backend="compile_ext")`` was given for a module: of ``dynamic``,
    ``mode`` and ``options`` those that were."""
    context = getattr(model, "dynamo_ctx", None)
    found = {"dynamic": getattr(context, "_dynamic", None)}
    wrapper = getattr(context, "callback", None)
    while wrapper is not None:
        if getattr(wrapper, "compiler_fn", None) is compile_ext_backend:
            return {**found, **wrapper.kwargs}
        wrapper = getattr(wrapper, "_torchdynamo_orig_backend", None)
    return found


def _own_options(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of the passes. Inductor's count where they forbid our kernels to be launched early."""
    early = Options.parse(mode, options).why_no_pdl() is None
    left_out = ("compile_ext.inner", "compile_ext.mode", "compile_ext.check")
    own = {
        name: sorted(value) if name == "compile_ext.disable" else value
        for name, value in (options or {}).items()
        if name.startswith(PREFIX) and name not in left_out
    }
    return {**own, "compile_ext.inner": "eager", **({} if early else {"compile_ext.pdl": False})}


@functools.cache
def _backend(target: Target | None, options: str) -> Any:
    """One object for all looks with the same options: Dynamo keys its cache by the backend, so a
    second look compiles nothing anew. One for each GPU that tensors of the device ``meta`` stand
    for: the passes go by it."""
    return functools.partial(compile_ext_backend, options=json.loads(options))


class LiveGraphs:
    """The graphs of a model: those that were compiled for what tensors of the device ``meta`` stand
    for now.

    Args:
        model: an nn.Module, what ``torch.compile`` returned for one, or a compiled function.
        args, kwargs: of a call, if any: the models and parameters among them count as the model's.
    """

    def __init__(self, model: Any, /, *args: Any, **kwargs: Any) -> None:
        self.target = original(model)
        # Pairs: an argument may be called as something around the target is.
        roots = [*roots_of(self.target).items(), *handed(args, kwargs)]
        self.names = names_of(roots)
        self._codes = _codes(self.target, roots)
        gpu = device.target()
        self.records = [r for r in records.live() if r.target == gpu and self._has(r)]

    def not_compiled(self, where: str, how: str) -> NotCompiledError:
        """The error of one who asks, where there are none."""
        fix = f"call the compiled model once, or {how}"
        if not isinstance(self.target, nn.Module):
            fix += f"; {where}(model) finds the graphs of a model that it calls"
        return NotCompiledError(
            where,
            f"{type(self.target).__name__} with no live compilation by backend 'compile_ext'",
            "a model that was compiled and called, or example arguments",
            fix,
        )

    def uses(self, record: GraphRecord) -> Iterator[tuple[Entry, str, tuple[str, ...]]]:
        """Of each entry of a graph, once for each weight of this model that it serves: its module
        path, and how the constants derived from the weight are kept.

        A weight that the caller hands in may be dead when one asks (``experts[i]``, a view of the
        call): what remains of such a call is its line of the program."""
        served = record.served()
        for entry in record.report.entries:
            if not entry.weights:
                yield entry, entry.hint, ()
            elif not served:
                at = set(entry.weights)
                yield from ((entry, x, ()) for x in self._names_of_dead(record, at, entry.hint))
            for tensors, binding in served:
                for position in entry.weights:
                    name = self.names.get(id(tensors[position]))
                    if name is None and position in record.call_inputs:
                        name = entry.hint
                    if name is not None:
                        yield entry, name, _kinds(position, binding)

    def _names_of_dead(self, record: GraphRecord, at: set[int], hint: str) -> list[str]:
        """The module paths of the weights at these positions, of calls whose inputs are dead."""
        if not record.call_inputs:
            return []
        names = [self.names.get(id(t)) for position, t in record.kept() if position in at]
        handed_in = [hint] if at & record.call_inputs else []
        return list(dict.fromkeys([*handed_in, *(x for x in names if x is not None)]))

    def has_line(self, file: str | None, line: int | None) -> bool:
        """Whether a line is one of the model's code."""
        return any(
            file == c.co_filename and line is not None and c.co_firstlineno <= line <= _last_line(c)
            for c in self._codes
        )

    def _has(self, record: GraphRecord) -> bool:
        seen = [t for tensors, _ in record.served() for t in tensors.values()]
        if record.call_inputs and not seen:
            seen = [t for _, t in record.kept()]
        if any(id(t) in self.names for t in seen):
            return True
        if not record.call_inputs.issuperset(record.weights):
            return False  # it has parameters, of another model
        return record.place is not None and self.has_line(record.place.file, record.place.line)


def _kinds(position: int, binding: Binding) -> tuple[str, ...]:
    """How the constants of this weight are kept."""
    return tuple(dict.fromkeys(c.state() for at, c in binding.constants if position in at))


def _codes(target: Any, roots: list[tuple[str, Any]]) -> list[CodeType]:
    """The code of the target and of every module in its roots."""
    modules = [v for _, v in roots if isinstance(v, nn.Module)]
    functions = [type(m).forward for top in modules for m in top.modules()]
    if not isinstance(target, nn.Module):
        target = inspect.unwrap(target)
        while isinstance(target, functools.partial):
            target = inspect.unwrap(target.func)
        functions += [getattr(target, "__func__", target), type(target).__call__]
    found = [getattr(f, "__code__", None) for f in functions]
    return list(dict.fromkeys(c for c in found if c is not None))


def _last_line(code: CodeType) -> int:
    return max(
        (line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno
    )
