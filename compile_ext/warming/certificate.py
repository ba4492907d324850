"""A certificate says what a warmup has left on disk, and compares it with what is there later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from compile_ext import checked_json
from compile_ext.manifest import NotCovered
from compile_ext.ops.compile_unit import Compiler
from compile_ext.ops.cute_compiler import CUTE
from compile_ext.ops.deep_gemm_compiler import DEEP_GEMM
from compile_ext.ops.errors import CertificateError
from compile_ext.ops.replace_file import replace_text
from compile_ext.ops.triton_compiler import TRITON
from compile_ext.warming.report import WarmupReport
from compile_ext.warming.store import Store
from compile_ext.warming.targets import target_here
from compile_ext.warming.versions import versions

FORMAT, VERSION = "compile_ext certificate", 1
_FIX = "run the warmup again, and save its certificate"
_COMPILERS: Mapping[str, Compiler] = {x.name: x for x in (TRITON, CUTE, DEEP_GEMM)}


@dataclass(frozen=True)
class CertifiedUnit:
    """One compiled kernel.

    Args:
        content: identifies its files; None where it was not compiled, and ``reason`` says why.
    """

    compiler: str
    kernel: str
    key: str
    content: str | None
    reason: str


@dataclass(frozen=True)
class CertifiedSite:
    """A call and the keys of the kernels that it needs."""

    op: str
    n: int | None
    k: int | None
    m: tuple[int, int | None]
    modules: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Certificate:
    """What a warmup has left.

    Args:
        arch, gpu, multiprocessors: what was compiled for; ``gpu`` is "" for any of ``arch``.
        versions: of what the kernels come from.
        folders: compiler -> where its kernels lay.
        units, sites: all that were planned.
        not_covered: the calls that were not, and why.
    """

    arch: str
    gpu: str
    multiprocessors: int
    versions: Mapping[str, str]
    folders: Mapping[str, str]
    units: tuple[CertifiedUnit, ...]
    sites: tuple[CertifiedSite, ...]
    not_covered: tuple[NotCovered, ...]

    def save(self, path: str | PathLike[str]) -> None:
        """Raises CertificateError where the file cannot be written."""
        head = {"format": FORMAT, "version": VERSION}
        content = json.loads(json.dumps({**head, **asdict(self)}))  # tuples are lists there
        try:
            replace_text(Path(path), checked_json.to_text(content))
        except OSError as error:
            fix = "make it writable, or name another one"
            wanted = "a file that can be written"
            raise CertificateError(str(path), str(error), wanted, fix) from error

    @staticmethod
    def load(path: str | PathLike[str]) -> Certificate:
        """Raises CertificateError where the file is damaged, edited, or no certificate."""
        try:
            content = checked_json.from_text(Path(path).read_text(encoding="utf-8"))
            if (content.pop("format", None), content.pop("version", None)) != (FORMAT, VERSION):
                raise ValueError(f"is no {FORMAT} of version {VERSION}")
            return _certificate(content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            raise CertificateError(str(path), found, f"a {FORMAT}", _FIX) from error

    def problems(self) -> Iterator[str]:
        """What is not as it was, of the caches of this process, the versions and the GPU here."""
        here = target_here()
        if here is not None and (
            here.arch != self.arch
            or (self.gpu and here.gpu != self.gpu)
            or here.multiprocessors != self.multiprocessors
        ):
            found = f"{here.gpu} with {here.multiprocessors} multiprocessors"
            yield f"GPU: {found}, certified for {self.gpu or self.arch} with {self.multiprocessors}"
        installed = versions()
        for name, wanted in self.versions.items():
            there = installed.get(name, "")
            # A host that builds an image may lack a driver.
            if there != wanted and (name != "driver" or (there and wanted)):
                yield f"{name}: {there or 'none'} here, certified with {wanted or 'none'}"
        stores: dict[str, Store | str] = {}
        for unit in self.units:
            if unit.compiler not in stores:
                stores[unit.compiler] = self._store(unit.compiler)
            problem = _problem(unit, stores[unit.compiler])
            if problem:
                yield f"{unit.compiler} {unit.kernel} ({unit.key}): {problem}"

    def _store(self, name: str) -> Store | str:
        """Where this process looks for what the compiler has compiled, or why nowhere."""
        compiler = _COMPILERS.get(name)
        if compiler is None:
            return f"no compiler {name} is known here"
        try:
            return Store(compiler, compiler.folder())
        except ImportError as error:
            return f"{name} is not installed ({error})"


def certificate_of(report: WarmupReport) -> Certificate:
    """Raises CertificateError where nothing was compiled for: no target."""
    if report.target is None:
        fix = "name a target, or run where the GPU is"
        raise CertificateError("certificate", "a warmup without a target", "one for a GPU", fix)
    units = []
    for x in report.results:
        content = None
        if x.status in ("compiled", "cached"):
            store = Store(x.unit.compiler, report.folders[x.unit.compiler.name])
            content = store.receipt_sum(x.unit.key)
        unit = x.unit
        units.append(CertifiedUnit(unit.compiler.name, unit.kernel, unit.key, content, x.reason))
    sites = []
    for planned in report.plan.sites:
        call = planned.site.call
        sites.append(
            CertifiedSite(call.op, call.n, call.k, call.m, planned.site.modules, planned.keys)
        )
    return Certificate(
        report.target.arch,
        report.target.gpu,
        report.target.multiprocessors,
        versions(),
        {name: str(folder) for name, folder in report.folders.items()},
        tuple(units),
        tuple(sites),
        report.not_covered,
    )


def _problem(unit: CertifiedUnit, store: Store | str) -> str | None:
    if isinstance(store, str):
        return store
    if unit.content is None:
        return f"was not compiled when the certificate was made: {unit.reason}"
    found = store.look(unit.key)
    if found.state == "missing":
        return f"missing in {store.folder}"
    if found.state == "damaged":
        return f"damaged in {store.folder}: {found.reason}"
    if store.receipt_sum(unit.key) != unit.content:
        return f"other content in {store.folder}: it was compiled anew since"
    return None


def _certificate(content: dict[str, Any]) -> Certificate:
    units = tuple(CertifiedUnit(**unit) for unit in content.pop("units"))
    sites = tuple(
        CertifiedSite(
            **{
                **site,
                "m": tuple(site["m"]),
                "modules": tuple(site["modules"]),
                "keys": tuple(site["keys"]),
            }
        )
        for site in content.pop("sites")
    )
    not_covered = tuple(
        NotCovered(**{**x, "modules": tuple(x["modules"])}) for x in content.pop("not_covered")
    )
    found = Certificate(units=units, sites=sites, not_covered=not_covered, **content)
    texts = [found.arch, found.gpu, *found.versions.values(), *found.folders.values()]
    for unit in units:
        texts += [unit.compiler, unit.kernel, unit.key, unit.reason, unit.content or ""]
    if not all(isinstance(x, str) for x in texts) or not isinstance(found.multiprocessors, int):
        raise TypeError("a field has another type than was written")
    return found
