"""``compile_ext.warmup``: compile all that a model's calls can reach, before the first of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from compile_ext.manifest import Manifest, sites
from compile_ext.ops.device import Target
from compile_ext.ops.errors import ArgumentError, WarmupError
from compile_ext.planning import Plan, plan
from compile_ext.warming.cache_dir import use_cache_dir
from compile_ext.warming.engine import Engine, Warmed
from compile_ext.warming.graphs import warm_graphs
from compile_ext.warming.load import device_for, loaded
from compile_ext.warming.progress import Progress
from compile_ext.warming.report import WarmupReport
from compile_ext.warming.targets import target_here


def warmup(
    model_or_manifest: Any,
    max_tokens: int = 8192,
    batch_sizes: Sequence[int] = (),
    jobs: int | None = None,
    cache_dir: str | PathLike[str] | None = None,
    progress: bool = True,
    *,
    target: Target | None = None,
    budget_seconds: float | None = None,
    strict: bool = False,
    load: bool = True,
) -> WarmupReport:
    """Compile every kernel that calls of 1 to ``max_tokens`` tokens can reach, in parallel, each
    once on this host; then launch each once here, so that it is loaded.

    What was compiled before is found on disk, checked against its checksums, and not compiled
    again. A second warmup on this host waits for the first one. Ctrl-C ends the workers and raises
    KeyboardInterrupt; what they had finished stays, and the next warmup goes on from there.

    Args:
        model_or_manifest: what ``torch.compile`` returned, after a call; or a Manifest, which needs
            neither model nor weights.
        max_tokens: the largest M of a call.
        batch_sizes: capture a CUDA graph for each.
        jobs: worker processes; None: as many as cores, free host memory and free GPU memory allow.
        cache_dir: keep all that is compiled below this folder, for this process from now on. It can
            be packed, and used on another host or path by the same call.
        progress: a bar on a terminal, else a line a kernel, on stderr.
        target: the GPU to compile for; None: the one that is here.
        budget_seconds: no unit is begun after that.
        strict: raise WarmupError where a unit has failed.
        load: launch each kernel once, where the target's GPU is here.

    Raises:
        WarmupError: ``strict``, and a unit has failed; the others are kept.
        NotCompiledError: the model was not compiled.
        CacheFolderError: ``cache_dir`` comes too late for a library, or takes no file.
        ArgumentError: a number is no such number.
    """
    start = time.monotonic()
    _check(max_tokens, jobs, budget_seconds)
    if cache_dir is not None:
        use_cache_dir(Path(cache_dir))
    model = None if isinstance(model_or_manifest, Manifest) else model_or_manifest
    manifest = model_or_manifest if model is None else sites(model)
    target = target or target_here()
    planned, warmed = Plan((), (), manifest.not_covered), Warmed()
    if target is not None:
        planned = plan(manifest, target, max_tokens)
        with Progress(progress) as shown:
            engine = Engine(target, jobs=jobs, budget_seconds=budget_seconds, progress=shown)
            warmed = engine.run(planned.units)
    results, device = warmed.results, device_for(model, target) if load else None
    if device is not None:
        results = tuple(loaded(results, device))
    if batch_sizes:
        warm_graphs(model, batch_sizes)
    report = WarmupReport(
        results,
        planned,
        target,
        time.monotonic() - start,
        warmed.capacity.jobs if warmed.capacity else 0,
        warmed.capacity.bound_by if warmed.capacity else "",
        warmed.folders,
        str(device) if device is not None else None,
        tuple(_warnings(manifest, planned, target)),
    )
    for text in report.warnings:
        warnings.warn(text, stacklevel=2)
    if strict and report.counts["failed"]:
        raise _failed(report)
    return report


def _warnings(manifest: Manifest, planned: Plan, target: Target | None) -> Iterator[str]:
    if target is None:
        yield (
            "nothing was compiled: there is no GPU here, and no target was named: pass"
            ' target=target_named("sm_90"), or run where the GPU is'
        )
    elif manifest.sites and not planned.units:
        yield (
            f"none of the {len(manifest.sites)} sites needs a kernel that is compiled for"
            f" {target.arch}: what runs instead is in report.plan, and compile-ext doctor says what"
            " is missing"
        )


def _check(max_tokens: int, jobs: int | None, budget_seconds: float | None) -> None:
    for name, value in (("max_tokens", max_tokens), ("jobs", jobs)):
        if value is not None and (not isinstance(value, int) or value < 1):
            fix = f"pass {name}=1 or more"
            raise ArgumentError("warmup", f"{name}={value!r}", "a whole number from 1", fix)
    if budget_seconds is not None and not budget_seconds >= 0:
        fix = "leave it out for no limit"
        raise ArgumentError("warmup", f"budget_seconds={budget_seconds!r}", "seconds from 0", fix)


def _failed(report: WarmupReport) -> WarmupError:
    failed = [x for x in report.results if x.status == "failed"]
    reasons = "; ".join(f"{x.unit.compiler.name} {x.unit.kernel}: {x.reason}" for x in failed[:3])
    more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
    return WarmupError(
        "warmup(strict=True)",
        f"{len(failed)} of {len(report.results)} kernels not compiled ({reasons}{more})",
        "all of them",
        "mend what the reasons say and run it again: what is compiled is kept",
    )
