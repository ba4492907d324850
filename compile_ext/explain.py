"""``explain``: for every candidate of a compiled model, which pass fired, or why it did not, and
what runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from compile_ext import records
from compile_ext.backend import compile_ext_backend
from compile_ext.ops.errors import NotCompiledError
from compile_ext.passes.report import Entry
from compile_ext.report import Fallback, Report, Row


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
    target = getattr(model, "_orig_mod", model)
    target = getattr(target, "_torchdynamo_orig_callable", target)
    if args or kwargs:
        look: Any = torch.compile(target, backend=_look)
        look(*args, **kwargs)
    names, codes = _names(target), _codes(target)
    alive = [r for r in records.live() if _belongs(r, names, codes)]
    fallbacks, full = _fallbacks(alive, codes)
    if not alive and not fallbacks:
        raise NotCompiledError(
            "explain",
            f"{type(target).__name__} with no live compilation by backend 'compile_ext'",
            "a model that was compiled and called, or example arguments",
            "call the compiled model once, or explain(model, *example_arguments)",
        )
    rows = dict.fromkeys(row for record in alive for row in _rows(record, names))
    return Report(
        rows=tuple(sorted(rows, key=_order)),
        fallbacks=fallbacks,
        graphs=len(alive),
        pass_seconds=sum(sum(r.report.seconds.values()) for r in alive),
        compile_seconds=sum(r.compile_seconds for r in alive),
        disabled=tuple(dict.fromkeys(p for r in alive for p in r.report.disabled)),
        metrics_full=full,
    )


def sites(model: Any) -> tuple[Row, ...]:
    """The GEMM sites of a compiled model: the rows of ``explain(model)`` that have a site."""
    return tuple(row for row in explain(model).rows if row.site is not None)


# One object for all looks: Dynamo keys its cache by the backend, so a second look compiles nothing
# anew.
_look = functools.partial(compile_ext_backend, options={"compile_ext.inner": "eager"})


def _order(row: Row) -> tuple[Any, ...]:
    parts = tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in row.module.split("."))
    return parts, row.site.m[0] if row.site else -1, row.op


def _rows(record: records.GraphRecord, names: dict[int, str]) -> Iterator[Row]:
    served = record.served()
    for entry in record.report.entries:
        if not entry.weights:
            yield _row(entry, entry.hint)
        for tensors in served:
            for position in entry.weights:
                name = names.get(id(tensors[position]))
                if name is not None:
                    yield _row(entry, name)


def _row(entry: Entry, name: str) -> Row:
    return Row(name, entry.op, entry.site, tuple(entry.decisions))


def _names(target: Any) -> dict[int, str]:
    """id of each tensor that belongs to the target -> module path."""
    tensors: dict[int, str] = {}
    for prefix, module in _modules(target):
        named = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in named:
            tensors.setdefault(id(tensor), _module_path(prefix + name))
        for path, child in module.named_modules():  # tensors that are plain attributes
            for name, value in vars(child).items():
                if isinstance(value, Tensor):
                    tensors.setdefault(
                        id(value), _module_path(".".join(filter(None, (prefix + path, name))))
                    )
    for name, value in _closure(target).items():
        if isinstance(value, Tensor):
            tensors.setdefault(id(value), name)
    return tensors


def _module_path(name: str) -> str:
    return name.removesuffix(".weight")


def _closure(target: Any) -> dict[str, Any]:
    """What a function reads from around it."""
    function = inspect.unwrap(getattr(target, "__func__", target)) if callable(target) else None
    if not inspect.isfunction(function):
        return {}
    found = inspect.getclosurevars(function)
    return {**found.globals, **found.nonlocals}


def _modules(target: Any) -> list[tuple[str, nn.Module]]:
    if isinstance(target, nn.Module):
        return [("", target)]
    owner = getattr(target, "__self__", None)
    if isinstance(owner, nn.Module):  # torch.compile(model.forward)
        return [("", owner)]
    return [
        (f"{n}.", getattr(v, "_orig_mod", v))
        for n, v in _closure(target).items()
        if isinstance(v, nn.Module)
    ]


def _codes(target: Any) -> list[CodeType]:
    functions = [type(m).forward for _, top in _modules(target) for m in top.modules()]
    if not isinstance(target, nn.Module):
        functions.append(inspect.unwrap(getattr(target, "__func__", target)))
    found = [getattr(f, "__code__", None) for f in functions]
    return list(dict.fromkeys(c for c in found if c is not None))


def _belongs(record: records.GraphRecord, names: dict[int, str], codes: list[CodeType]) -> bool:
    if record.weights:
        return any(id(t) in names for tensors in record.served() for t in tensors.values())
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
