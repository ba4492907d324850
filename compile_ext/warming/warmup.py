"""``compile_ext.warmup``: compile all that a model's calls can reach, before the first of them."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from compile_ext.manifest import Manifest, sites
from compile_ext.ops import triton_support
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target
from compile_ext.ops.errors import ArgumentError, WarmupError, in_one_line
from compile_ext.planning import Plan, plan
from compile_ext.warming.cache_dir import use_cache_dir
from compile_ext.warming.graphs import GraphResult, Inputs, foretell, warm_graphs
from compile_ext.warming.load import device_for, load_kernel
from compile_ext.warming.progress import Progress
from compile_ext.warming.report import WarmupReport
from compile_ext.warming.targets import target_here

_SLOW = 2.0  # seconds of a unit
# Above what any engine takes in one call. A plan asks for each tile of 64: 18 s for these.
_MOST_TOKENS = 2**20
_FOLDER = threading.RLock()  # re-entrant: ``inputs`` and the model are the user's code
# A fork has not got the thread that may hold it.
os.register_at_fork(after_in_child=_FOLDER._at_fork_reinit)  # type: ignore[attr-defined]


def warmup(
    model_or_manifest: Any,
    max_tokens: int = 8192,
    batch_sizes: Sequence[int] = (),
    jobs: int | None = None,
    cache_dir: str | PathLike[str] | None = None,
    progress: bool = True,
    *,
    inputs: Inputs | None = None,
    target: Target | None = None,
    budget_seconds: float | None = None,
    strict: bool = False,
) -> WarmupReport:
    """Compile every kernel that calls of 1 to ``max_tokens`` tokens can reach, in parallel, each
    once on this host; and where the target's GPU is here, launch each once, so that it is loaded.

    What was compiled before is found on disk, checked against its checksums, and not compiled
    again. A second warmup on this host waits for the first one. Ctrl-C ends the workers and raises
    KeyboardInterrupt; what they had finished stays, and the next warmup goes on from there.

    Args:
        model_or_manifest: what ``torch.compile`` returned, after a call; or a Manifest, which needs
            neither model nor weights.
        max_tokens: the largest M of a call.
        batch_sizes: call the model for each, so that each variant of its graphs is compiled, and
            with ``mode="reduce-overhead"`` a CUDA graph is captured. What these graphs call is
            compiled before. Warm up in the mode that serves, such as ``torch.inference_mode()``.
        jobs: worker processes; None: as many as cores, free host memory and free GPU memory allow.
        cache_dir: keep all that is compiled below this folder, for this process from now on, in all
            threads: another one that names a folder waits. It can be packed, and used on another
            host or path by the same call.
        progress: a bar on a terminal, else a line a kernel, on stderr.
        inputs: ``inputs(batch_size)``: the arguments of one call of the model, a tuple or a dict.
        target: the GPU to compile for; None: the one that is here.
        budget_seconds: no unit is begun after that; those of few tokens come first.
        strict: raise WarmupError where a unit has failed.

    Raises:
        WarmupError: ``strict``, and a unit has failed; the others are kept.
        NotCompiledError: the model was not compiled.
        CacheFolderError: ``cache_dir`` comes too late for a library, or takes no file.
        ArgumentError: an argument is of another type, or a number out of range.
    """
    from compile_ext.warming.engine import Engine  # 40 ms that `import compile_ext` need not pay

    start = time.monotonic()
    _check(max_tokens, jobs, budget_seconds)
    _check_kinds(model_or_manifest, target, cache_dir)
    model = None if isinstance(model_or_manifest, Manifest) else model_or_manifest
    batch_sizes = _check_graphs(model, batch_sizes, inputs)
    with Progress(progress) as shown, _one_folder(shown, cache_dir):
        if cache_dir is not None:
            use_cache_dir(Path(cache_dir))
        triton_support.keep_cache_folder()
        target = target or target_here()
        graphs: tuple[GraphResult, ...] = ()
        problems: tuple[str, ...] = ()
        device = device_for(model, target)
        engine = Engine(
            target,
            jobs=jobs,
            budget_seconds=budget_seconds,
            start=start,
            progress=shown,
            load=None if device is None else functools.partial(load_kernel, device=device),
        )
        if batch_sizes and inputs is not None:
            if target is not None:
                foretold, problems = _foretold(model, batch_sizes, inputs, target)
                engine.run(_in_order(plan(foretold, target, max_tokens).units, budget_seconds))
            graphs = warm_graphs(model, batch_sizes, inputs)
        manifest = model_or_manifest if model is None else sites(model)
        planned = _plan(manifest, target, max_tokens)
        warmed = engine.run(_in_order(planned.units, budget_seconds))
        report = WarmupReport(
            warmed.results,
            graphs,
            planned,
            target,
            time.monotonic() - start,
            warmed.capacity.jobs if warmed.capacity else 0,
            warmed.capacity.bound_by if warmed.capacity else "",
            warmed.folders,
            str(device) if device is not None else None,
            (*problems, *_warnings(manifest, planned, target)),
        )
    for text in report.warnings:
        warnings.warn(text, stacklevel=2)
    if strict and (report.counts["failed"] or any(x.reason for x in graphs)):
        raise _failed(report)
    return report


@contextlib.contextmanager
def _one_folder(shown: Progress, cache_dir: Any) -> Iterator[None]:
    """No other thread moves the process into another ``cache_dir`` meanwhile. One that names none
    does not wait: a seal's callback may warm up while this thread waits for Dynamo, which it holds.
    """
    if cache_dir is None:
        yield
        return
    if not _FOLDER.acquire(blocking=False):
        shown.say("waiting for the warmup of another thread")
        _FOLDER.acquire()
    try:
        yield
    finally:
        _FOLDER.release()


def _plan(manifest: Manifest, target: Target | None, max_tokens: int) -> Plan:
    if target is None:
        return Plan((), (), manifest.not_covered)
    return plan(manifest, target, max_tokens)


def _in_order(units: Sequence[CompileUnit], budget: float | None) -> list[CompileUnit]:
    """Those of few tokens first, as they are; where all will be compiled, the slow ones before
    them: one that began last would be waited for alone (a kernel of DeepGEMM takes 3 to 10 s, one
    of Triton 1 s)."""
    return sorted(units, key=lambda x: -x.seconds if budget is None and x.seconds > _SLOW else 0.0)


def _foretold(
    model: Any, batch_sizes: Sequence[int], inputs: Inputs, target: Target
) -> tuple[Manifest, tuple[str, ...]]:
    """What the graphs will call, to compile it before they run and compile it one by one; and what
    stood in the way, a warning: they run then as they are."""
    try:
        return foretell(model, batch_sizes, inputs, target), ()
    except Exception as error:  # of the model, which needs data to go on
        said = (
            f"what the graphs call could not be seen before they ran ({in_one_line(error)}): their"
            " kernels were compiled one after another; collect(model, ...) with example arguments"
            " and warm up its manifest first"
        )
        return Manifest(), (said,)


def _warnings(manifest: Manifest, planned: Plan, target: Target | None) -> Iterator[str]:
    if target is None:
        yield (
            "nothing was compiled: there is no GPU here, and no target was named: pass"
            ' target=compile_ext.target_named("sm_90"), or run where the GPU is'
        )
    elif manifest.sites and not planned.sites:
        yield (
            f"none of the {len(manifest.sites)} sites could be planned for {target.arch}; of"
            f" {planned.not_covered[-1].op}: {planned.not_covered[-1].reason}"
        )
    elif manifest.sites and not planned.units:
        yield (
            f"none of the {len(manifest.sites)} sites needs a kernel that is compiled for"
            f" {target.arch}: what runs instead is in report.plan, and compile-ext doctor says what"
            " is missing"
        )


def _check(max_tokens: Any, jobs: Any, budget_seconds: Any) -> None:
    if not isinstance(max_tokens, int) or not 1 <= max_tokens <= _MOST_TOKENS:
        wanted = f"a whole number from 1 to {_MOST_TOKENS}"
        fix = "pass the most tokens of a call"
        raise ArgumentError("warmup", f"max_tokens={max_tokens!r}", wanted, fix)
    if jobs is not None and (not isinstance(jobs, int) or jobs < 1):
        fix = "pass jobs=1 or more"
        raise ArgumentError("warmup", f"jobs={jobs!r}", "a whole number from 1", fix)
    if budget_seconds is not None and (
        not isinstance(budget_seconds, int | float) or not budget_seconds >= 0
    ):
        fix = "leave it out for no limit"
        raise ArgumentError("warmup", f"budget_seconds={budget_seconds!r}", "seconds from 0", fix)


def _check_kinds(model_or_manifest: Any, target: Any, cache_dir: Any) -> None:
    if model_or_manifest is None or isinstance(model_or_manifest, str | PathLike):
        fix = "Manifest.load(path), where it is a file"
        wanted = "a compiled model or a Manifest"
        raise ArgumentError("warmup", repr(model_or_manifest), wanted, fix)
    if target is not None and not isinstance(target, Target):
        fix = 'pass target_named("H200"), or leave it out for the GPU that is here'
        raise ArgumentError("warmup", f"target={target!r}", "a Target", fix)
    if cache_dir is not None and not isinstance(cache_dir, str | PathLike):
        fix = "pass a str or a Path"
        raise ArgumentError("warmup", f"cache_dir={cache_dir!r}", "a path", fix)


def _check_graphs(model: Any, batch_sizes: Any, inputs: Any) -> tuple[int, ...]:
    """The batch sizes."""
    fix = "pass numbers of tokens or sequences"
    try:
        sizes = tuple(map(operator.index, batch_sizes))
    except TypeError as error:
        found = f"batch_sizes={batch_sizes!r}"
        raise ArgumentError("warmup", found, "whole numbers from 1", fix) from error
    if any(x < 1 for x in sizes):
        raise ArgumentError("warmup", f"batch_sizes={sizes!r}", "whole numbers from 1", fix)
    if inputs is not None and not callable(inputs):
        wanted, fix = "a function of the batch size", "inputs=lambda size: (...)"
        raise ArgumentError("warmup", f"inputs of type {type(inputs).__name__}", wanted, fix)
    if bool(sizes) == (inputs is not None) and (model is not None or not sizes):
        return sizes
    given = "a manifest" if model is None else "a model"
    named = f"batch_sizes={sizes!r}" if sizes else "no batch_sizes"
    asked = "no inputs" if inputs is None else "inputs"
    raise ArgumentError(
        "warmup",
        f"{given}, {named} and {asked}",
        "a model, batch_sizes and inputs together, or none of the last two",
        "e.g. batch_sizes=(1, 8), inputs=lambda size: (torch.zeros(size, dtype=torch.long),)",
    )


def _failed(report: WarmupReport) -> WarmupError:
    failed = [
        f"{x.unit.compiler.name} {x.unit.kernel}: {x.reason}"
        for x in report.results
        if x.status == "failed"
    ]
    failed += [f"graph of batch size {x.batch_size}: {x.reason}" for x in report.graphs if x.reason]
    more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
    total = len(report.results) + len(report.graphs)
    return WarmupError(
        "warmup(strict=True)",
        f"{len(failed)} of {total} kernels and graphs not compiled ({'; '.join(failed[:3])}{more})",
        "all of them",
        "mend what the reasons say and run it again: what is compiled is kept",
    )
