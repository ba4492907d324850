"""``explain``: for every candidate of a compiled model, which pass fired, or why it did not, and
what runs.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import nn

from compile_ext import marks, records
from compile_ext.backend import compile_ext_backend
from compile_ext.bindings import Binding
from compile_ext.ops.define import definitions
from compile_ext.ops.errors import NotCompiledError
from compile_ext.passes.report import Entry, Site
from compile_ext.report import Fallback, Report, Row
from compile_ext.tensors import names_of, original, roots_of


def explain(model: Any, *args: Any, **kwargs: Any) -> Report:
    """Say for each candidate what the passes did.

    Args:
        model: an nn.Module, what ``torch.compile`` returned for one, or a compiled function.
        args, kwargs: with any, the model runs once on them, compiled with
            ``compile_ext.inner="eager"``, only to look: no kernel is compiled, and what the model
            writes (a KV cache) is written. Without, the compilations that have happened are
            reported.

    Raises:
        NotCompiledError: without arguments, and nothing of this model was compiled by this backend.
    """
    target = original(model)
    if args or kwargs:
        look: Any = torch.compile(target, backend=_look)
        look(*args, **kwargs)
    names, codes = names_of(target), _codes(target)
    alive = [r for r in records.live() if _belongs(r, names, codes)]
    fallbacks, full = _fallbacks(alive, codes)
    if not alive and not fallbacks:
        raise NotCompiledError(
            "explain",
            f"{type(target).__name__} with no live compilation by backend 'compile_ext'",
            "a model that was compiled and called, or example arguments",
            "call the compiled model once, or explain(model, *example_arguments)",
        )
    disabled = tuple(dict.fromkeys(p for r in alive for p in r.report.disabled))
    rows = list(dict.fromkeys(row for record in alive for row in _rows(record, names)))
    rows += marks.unnamed(rows, names, disabled)
    return Report(
        rows=tuple(sorted(rows, key=_order)),
        fallbacks=fallbacks,
        graphs=len(alive),
        pass_seconds=sum(sum(r.report.seconds.values()) for r in alive),
        compile_seconds=_compile_seconds(alive),
        disabled=disabled,
        metrics_full=full,
    )


def sites(model: Any) -> tuple[Row, ...]:
    """The GEMM sites of a compiled model: the rows of ``explain(model)`` that have a site."""
    return tuple(row for row in explain(model).rows if row.site is not None)


# One object for all looks: Dynamo keys its cache by the backend, so a second look compiles nothing
# anew.
_look = functools.partial(compile_ext_backend, options={"compile_ext.inner": "eager"})


def _order(row: Row) -> tuple[Any, ...]:
    parts = tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in row.module.split("."))
    return parts, row.site.m[0] if row.site else -1, row.op


def _rows(record: records.GraphRecord, names: dict[int, str]) -> Iterator[Row]:
    served = record.served()
    for entry in record.report.entries:
        if not entry.weights:
            yield _row(entry, entry.hint)
        for tensors, binding in served:
            for position in entry.weights:
                name = names.get(id(tensors[position]))
                if name is None and position in record.call_inputs:
                    name = entry.hint
                if name is not None:
                    yield _row(entry, name, _kinds(position, binding))


def _row(entry: Entry, name: str, kinds: tuple[str, ...] = ()) -> Row:
    site = _as_it_ran(entry.site) if entry.site is not None else None
    return Row(name, entry.op, site, tuple(entry.decisions), kinds)


def _as_it_ran(site: Site) -> Site:
    """The site, with the kernels that were chosen at compile time and gave up in a call since."""
    for definition in definitions():
        if str(definition.overload._schema.name) != site.op:
            continue
        for kernel in definition.kernels:
            said = [f"{kernel.name}: {r}" for r in dict.fromkeys(kernel.failures.values())]
            if said and re.search(rf"\b{kernel.name}\b", site.kernel):
                chosen = f"{site.kernel} (gave up: {kernel.name})"
                site = replace(site, kernel=chosen, passed_over=(*site.passed_over, *said))
    return site


def _kinds(position: int, binding: Binding) -> tuple[str, ...]:
    """How the constants of this weight are kept."""
    return tuple(dict.fromkeys(c.state() for at, c in binding.constants if position in at))


def _codes(target: Any) -> list[CodeType]:
    """The code of the target and of every module that it can reach."""
    modules = [v for v in roots_of(target).values() if isinstance(v, nn.Module)]
    functions = [type(m).forward for top in modules for m in top.modules()]
    while isinstance(target, functools.partial):
        target = target.func
    if not isinstance(target, nn.Module):
        functions += [inspect.unwrap(getattr(target, "__func__", target)), type(target).__call__]
    found = [getattr(f, "__code__", None) for f in functions]
    return list(dict.fromkeys(c for c in found if c is not None))


def _belongs(record: records.GraphRecord, names: dict[int, str], codes: list[CodeType]) -> bool:
    if any(id(t) in names for tensors, _ in record.served() for t in tensors.values()):
        return True
    if not record.call_inputs.issuperset(record.weights):
        return False  # it has parameters, of another model
    return record.place is not None and _inside(record.place.file, record.place.line, codes)


def _inside(file: str | None, line: int | None, codes: list[CodeType]) -> bool:
    return any(
        file == c.co_filename and line is not None and c.co_firstlineno <= line <= _last_line(c)
        for c in codes
    )


def _last_line(code: CodeType) -> int:
    return max(
        (line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno
    )


def _compile_seconds(alive: list[records.GraphRecord]) -> float:
    """Of Dynamo, our passes and the inner compiler together, as far as Dynamo still has a note."""
    from torch._dynamo.utils import get_compilation_metrics

    # The numbers begin anew after a reset: the last compilation of a name is the live one.
    whole = {str(m.compile_id): m.entire_frame_compile_time_s for m in get_compilation_metrics()}
    return sum(whole.get(r.compile_id) or r.backend_seconds for r in alive)


def _fallbacks(
    alive: list[records.GraphRecord], codes: list[CodeType]
) -> tuple[tuple[Fallback, ...], bool]:
    from torch._dynamo.utils import _compilation_metrics, get_compilation_metrics

    found = [
        Fallback(f"{p.file}:{p.line} in {p.function}", "graph break", _first_line(p.graph_break))
        for p in (r.place for r in alive)
        if p is not None and p.graph_break
    ]
    frames: dict[str, Any] = {}
    for metrics in get_compilation_metrics():
        if (metrics.start_time_us or 0) < records.reset_time_us:
            continue
        frame = str(metrics.compile_id).split("/")[0]  # "3/1" is the second compilation of frame 3
        if metrics.co_filename is not None:
            frames[frame] = metrics
        known = frames.get(frame)  # past the recompile limit Dynamo leaves the code's name out
        if metrics.fail_type and known and _inside(known.co_filename, known.co_firstlineno, codes):
            where = f"{known.co_filename}:{known.co_firstlineno} in {known.co_name}"
            found.append(Fallback(where, "eager", _first_line(metrics.fail_reason)))
    kept = _compilation_metrics  # a deque of limited length: were entries since the reset dropped?
    full = len(kept) == kept.maxlen and (kept[0].start_time_us or 0) >= records.reset_time_us
    return tuple(dict.fromkeys(found)), full


def _first_line(text: str | None) -> str:
    return (text or "no reason given").strip().splitlines()[0]
