"""``compile-ext warmup`` and ``compile-ext verify``: without the model, in an image build."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from compile_ext.manifest import Manifest
from compile_ext.ops.errors import ArgumentError
from compile_ext.warming.cache_dir import look_in
from compile_ext.warming.certificate import Certificate
from compile_ext.warming.targets import target_named
from compile_ext.warming.warmup import warmup


def warm(
    console: Console,
    manifest: Path,
    *,
    max_tokens: int,
    cache_dir: Path | None,
    jobs: int | None,
    target: str | None,
    budget_seconds: float | None,
    certificate: Path | None,
    imports: Sequence[str],
    strict: bool,
) -> bool:
    """Print the report. Returns whether anything is warm: False where there is no target, or none
    of the units could be compiled.

    Raises:
        CompileExtError: of any argument, or a unit has failed and ``strict`` is given.
    """
    for module in imports:
        try:
            importlib.import_module(module)
        except Exception as error:  # of the module's own code, or of what is no name
            found = f"{module!r} ({type(error).__name__}: {error})"
            fix = "install it, correct the name, or mend the module"
            raise ArgumentError("--import", found, "a module that can be imported", fix) from error
    report = warmup(
        Manifest.load(manifest),
        max_tokens,
        jobs=jobs,
        cache_dir=cache_dir,
        target=None if target is None else target_named(target),
        budget_seconds=budget_seconds,
        strict=strict,
    )
    console.print(report)
    if certificate is not None:
        report.certificate().save(certificate)
    return report.target is not None and not report.is_in_vain


def verify(console: Console, certificate: Path, cache_dir: Path | None) -> bool:
    """Print what is not as it was. Returns whether all is."""
    certified = Certificate.load(certificate)
    if cache_dir is not None:
        look_in(cache_dir)
    problems = list(certified.problems())
    for problem in problems:
        console.print(problem, markup=False, highlight=False, soft_wrap=True)
    if not problems:
        console.print(f"{len(certified.units)} kernels are as certified")
    for x in certified.not_covered:
        text = f"not covered when it was made: {x.op} ({', '.join(x.modules)}): {x.reason}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return not problems
