"""``explain``: for every candidate of a compiled model, which pass fired, or why it did not, and
what runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from compile_ext import marks, records
from compile_ext.live_graphs import LiveGraphs, look
from compile_ext.ops.define import definitions
from compile_ext.passes.report import Site
from compile_ext.report import Fallback, Report, Row


def explain(model: Any, /, *args: Any, **kwargs: Any) -> Report:
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
    if args or kwargs:
        look(model, *args, **kwargs)
    graphs = LiveGraphs(model, *args, **kwargs)
    alive, names = graphs.records, graphs.names
    fallbacks, full = _fallbacks(graphs)
    if not alive and not fallbacks:
        raise graphs.not_compiled("explain", "explain(model, *example_arguments)")
    disabled = tuple(dict.fromkeys(p for r in alive for p in r.report.disabled))
    rows = list(dict.fromkeys(row for record in alive for row in _rows(graphs, record)))
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


def _order(row: Row) -> tuple[Any, ...]:
    parts = tuple((0, int(p), "") if p.isdecimal() else (1, 0, p) for p in row.module.split("."))
    return parts, row.site.m[0] if row.site else -1, row.op


def _rows(graphs: LiveGraphs, record: records.GraphRecord) -> Iterator[Row]:
    for entry, name, constants in graphs.uses(record):
        if entry.site is not None or entry.decisions:
            site = _as_it_ran(entry.site) if entry.site is not None else None
            yield Row(name, entry.op, site, tuple(entry.decisions), constants)


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


def _compile_seconds(alive: list[records.GraphRecord]) -> float:
    """Of Dynamo, our passes and the inner compiler together, as far as Dynamo still has a note."""
    from torch._dynamo.utils import get_compilation_metrics

    # The numbers begin anew after a reset: the last compilation of a name is the live one.
    whole = {str(m.compile_id): m.entire_frame_compile_time_s for m in get_compilation_metrics()}
    return sum(whole.get(r.compile_id) or r.backend_seconds for r in alive)


def _fallbacks(graphs: LiveGraphs) -> tuple[tuple[Fallback, ...], bool]:
    from torch._dynamo.utils import _compilation_metrics, get_compilation_metrics

    found = [
        Fallback(f"{p.file}:{p.line} in {p.function}", "graph break", _first_line(p.graph_break))
        for p in (r.place for r in graphs.records)
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
        if metrics.fail_type and known and graphs.has_line(known.co_filename, known.co_firstlineno):
            where = f"{known.co_filename}:{known.co_firstlineno} in {known.co_name}"
            found.append(Fallback(where, "eager", _first_line(metrics.fail_reason)))
    kept = _compilation_metrics  # a deque of limited length: were entries since the reset dropped?
    full = len(kept) == kept.maxlen and (kept[0].start_time_us or 0) >= records.reset_time_us
    return tuple(dict.fromkeys(found)), full


def _first_line(text: str | None) -> str:
    return (text or "no reason given").strip().splitlines()[0]
