"""A CuTe DSL kernel of an op: what is compiled of it, on disk and loaded."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compile_ext.ops import compiled_cache, cute_compile, cute_support, device, launches
from compile_ext.ops.compiled_cache import Key
from compile_ext.ops.cuda_launch import CudaKernel
from compile_ext.ops.cute_compiler import CUTE
from compile_ext.ops.errors import KernelUnavailable

_PACKAGE = "compile_ext.ops"
_IMPORT = re.compile(
    rb"^\s*(?:from|import) compile_ext\.ops(?:\.(\w+)| import (\([^)]*\)|.*))", re.MULTILINE
)


class Parameters(Protocol):
    """The compile-time parameters: a NamedTuple of numbers and texts, whose ``repr`` is part of the
    key. What follows from them are properties."""

    @property
    def threads(self) -> int: ...  # of a CTA
    @property
    def cluster(self) -> int: ...  # CTAs of a cluster


@dataclass(frozen=True, eq=False)
class CuteKernel:
    """A kernel in CuTe DSL, compiled for each set of compile-time parameters.

    Args:
        source: the module of ``compile_ext.ops`` that holds it. Nothing but the compiler imports
            it.
        builder: the class in there (``cute_compile.compile_cubin``).
        layout: a letter of ``struct`` for each of the kernel's parameters (``CudaKernel``).
    """

    source: str
    builder: str
    layout: str
    _loaded: dict[tuple[Any, device.Capability], CudaKernel] = field(default_factory=dict)
    _on_disk: dict[tuple[Any, device.Capability], bool] = field(default_factory=dict)
    _loading: threading.Lock = field(default_factory=threading.Lock)

    def why_not(self, x: Tensor, parameters: Parameters) -> str | None:
        """Why it cannot run on the device of ``x`` with these parameters, or None."""
        reason = cute_support.why_not(x)
        if reason or cute_support.compiler() is not None:
            return reason
        at = parameters, device.capability(x) or (0, 0)
        if at not in self._on_disk:  # asked once: this is on the path of every call
            self._on_disk[at] = compiled_cache.find(self.key(*at)) is not None
        if self._on_disk[at]:
            return None
        place = compiled_cache.folder()
        return f"{cute_support.why_no_compiler()}; nor is the kernel in {place}"

    def launch(
        self, x: Tensor, parameters: Parameters, grid: int, *arguments: Any, pdl: bool
    ) -> None:
        """Launch ``grid`` CTAs on the device of ``x``, whose compiled kernel is taken from memory,
        from disk, or made.

        Args:
            arguments: of ``layout``; pointers as addresses, 0 for none.
            pdl: as in ``CudaKernel.launch``.

        Raises:
            KernelUnavailable: CuTe DSL does not compile it, or the driver does not load it.
            CudaError: an error of the device.
        """
        noted = launches.recorder()
        if noted is not None:
            noted.append(self.launch_of(parameters, device.capability(x) or (0, 0)))
            return
        index = x.get_device()
        at = parameters, _capability(index)
        kernel = self._loaded.get(at) or self._load(*at)
        kernel.launch(index, grid, arguments, pdl=pdl)

    def prepare(self, parameters: Parameters, capability: device.Capability) -> bool:
        """Compile the kernel, where it is not on disk: True if so. Needs no GPU. Raises
        KernelUnavailable where it cannot be compiled."""
        key = self.key(parameters, capability)
        return _obtain(self.source, self.builder, parameters, capability, key)[1]

    def launch_of(self, parameters: Parameters, capability: device.Capability) -> launches.Launch:
        """The launch with these parameters, and how to compile its kernel."""
        key = self.key(parameters, capability)
        made_from = (*key.made_from, ("compiler", str(key.compiler)))
        built: Any = self.source, self.builder, parameters, cute_support.arch(capability)
        compile = functools.partial(cute_compile.compile_cubin, *built)
        return launches.Launch(CUTE, self.source, made_from, (key, compile))

    def key(self, parameters: Parameters, capability: device.Capability) -> Key:
        made_from = {
            "arch": cute_support.arch(capability),
            "parameters": repr(parameters),
            "source": source_hash(self.source, type(parameters).__module__),
        }
        return Key(self.source, tuple(made_from.items()), cute_support.compiler())

    def _load(self, parameters: Parameters, capability: device.Capability) -> CudaKernel:
        with self._loading:
            at = parameters, capability
            if at not in self._loaded:
                key = self.key(*at)
                image, _ = _obtain(self.source, self.builder, parameters, capability, key)
                shape = parameters.threads, parameters.cluster
                self._loaded[at] = CudaKernel(image, self.layout, *shape)
            return self._loaded[at]


def _obtain(
    source: str, builder: str, parameters: Any, capability: device.Capability, key: Key
) -> tuple[bytes, bool]:
    """The cubin, and whether it was compiled now."""
    if key.compiler is None:
        found = compiled_cache.find(key)
        if found is None:
            raise KernelUnavailable(str(cute_support.why_no_compiler()))
        return found, False

    arch = cute_support.arch(capability)
    compile = functools.partial(cute_compile.compile_cubin, source, builder, parameters, arch)
    return compiled_cache.obtain(key, compile)


@functools.cache
def _capability(index: int) -> device.Capability:
    return torch.cuda.get_device_capability(index)


@functools.cache
def source_hash(kernel: str, parameters: str) -> str:
    """Of all of this package that decides what is compiled: the kernel's module and what that
    imports, the module of its parameters, and how the compiler is called. Not of the release, which
    a checkout has none of."""
    files = {*_with_imports(f"{_PACKAGE}.{kernel}", set()), parameters, cute_compile.__name__}
    digest = hashlib.sha256()
    for module in sorted(files):
        digest.update(module.encode() + b"\0" + _source(module) + b"\0")
    return digest.hexdigest()


def _with_imports(module: str, seen: set[str]) -> set[str]:
    if module not in seen:
        seen.add(module)
        for other in _imports(_source(module)):
            _with_imports(other, seen)
    return seen


def _imports(source: bytes) -> Iterator[str]:
    """The modules of ``compile_ext.ops`` that a source imports, wherever in it. By a pattern: to
    parse a kernel takes 10 ms and more, which every process would pay."""
    for module, names in _IMPORT.findall(re.sub(rb"#.*", b"", source)):
        for name in [module] if module else names.strip(b"() \n").split(b","):
            if name.strip():  # behind the last comma is none
                yield f"{_PACKAGE}.{name.split()[0].decode()}"


def _source(module: str) -> bytes:
    """Found without an import: a kernel's module needs the compiler."""
    found = getattr(sys.modules.get(module), "__file__", None)
    if found is None:
        spec = importlib.util.find_spec(module)
        found = spec.origin if spec else None
    if found is None:
        raise AssertionError(f"{module} has no source")
    return Path(found).read_bytes()
