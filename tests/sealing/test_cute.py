"""A seal and CuTe DSL: a stand-in with the classes that it compiles through."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from compile_ext import CompileEvent, SealError, seal
from compile_ext.ops import compiled_cache, cute_compile
from compile_ext.ops.define import definition_of
from compile_ext.ops.errors import KernelUnavailable

SOURCES = {
    "cutlass": "",
    "cutlass.base_dsl": "",
    "cutlass.base_dsl.dsl": """
class BaseDSL:
    cache = {}
    def compile_and_cache(self, module, *, original_function_name=None, full_args=None):
        return f"compiled {module}"
    def call(self, name, *args):  # of a function that is called as it is
        if name not in self.cache:
            self.cache[name] = self.compile_and_cache(
                name, original_function_name=name, full_args=args)
        return self.cache[name]
""",
    "cutlass.base_dsl.compiler": """
from .dsl import BaseDSL
traced = []
class CompileCallable:
    def __getitem__(self, options):
        return CompileCallable()
    def __call__(self, *args, **kwargs):
        return self._compile(*args, **kwargs)
    def _compile(self, func, *args, **kwargs):
        traced.append(func)
        if kwargs.get("compile_to_precompiled_mlir"):
            return "a trace"
        folder = kwargs.get("options", "").rpartition(" ")[2]
        if folder:
            open(folder + "/kernel.cubin", "wb").write(b"cubin")
        return BaseDSL().compile_and_cache(func, original_function_name="explicit")
""",
    "cutlass.cute": """
from cutlass.base_dsl.compiler import CompileCallable
compile = CompileCallable()
""",
    "cutlass.cute.runtime": "def make_fake_stream(): pass",
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in SOURCES:
            return None
        is_package = name in ("cutlass", "cutlass.base_dsl", "cutlass.cute")
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        exec(SOURCES[module.__name__], module.__dict__)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    finder = Finder()
    sys.meta_path.insert(0, finder)
    for name in SOURCES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    sys.meta_path.remove(finder)
    for name in SOURCES:
        sys.modules.pop(name, None)


def cute() -> Any:
    return importlib.import_module("cutlass.cute")


def traced() -> list[Any]:
    found: list[Any] = importlib.import_module("cutlass.base_dsl.compiler").traced
    return found


@pytest.mark.parametrize("imported", [False, True])
def test_anyones_compile(library: None, imported: bool, heard: list[CompileEvent]) -> None:
    def kernel() -> None: ...

    if imported:
        cute()
    with seal("error"), pytest.raises(SealError) as refused:
        cute().compile(kernel, torch.zeros(4, 8), 3)
    event = refused.value.event
    assert (event.kind, event.kernel) == ("cute", kernel.__qualname__)
    assert event.shapes == ("0: float32[4, 8]", "1: 3")
    assert traced() == []
    with seal(heard.append):
        assert cute().compile["option"](kernel) == f"compiled {kernel}"
    assert len(heard) == 1  # not again where the trace is compiled
    assert cute().compile(kernel) == f"compiled {kernel}"
    assert len(heard) == 1


def test_a_trace_alone_is_no_compile(library: None) -> None:
    with seal("error"):
        assert cute().compile("f", compile_to_precompiled_mlir=True) == "a trace"


def test_a_function_that_is_called_as_it_is(library: None, heard: list[CompileEvent]) -> None:
    cute()
    dsl: Any = importlib.import_module("cutlass.base_dsl.dsl").BaseDSL()
    with seal("error"), pytest.raises(SealError):
        dsl.call("f", torch.zeros(2))
    with seal(heard.append):
        dsl.call("f", torch.zeros(2))
        dsl.call("f", torch.zeros(2))
    assert [(e.kind, e.kernel, e.shapes) for e in heard] == [("cute", "f", ("0: float32[2]",))]


class Parameters(NamedTuple):
    experts: int = 256


@pytest.fixture
def own(library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A kernel of this package, of an op that has no other before its reference."""
    module: Any = ModuleType("compile_ext.ops.seal_cute_kernel")

    class Builder:
        def __init__(self, parameters: Parameters) -> None:
            pass

        def arguments(self) -> tuple[Any, ...]:
            return ()

    module.Builder = Builder
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compiled_cache, "folder", lambda: tmp_path)
    key = compiled_cache.Key("seal_cute_kernel", (), "cute 1")

    def run(x: Tensor, *rest: Any, prefetch: bool = False) -> Any:
        made, _ = compiled_cache.obtain(
            key,
            lambda: cute_compile.compile_cubin(
                "seal_cute_kernel", "Builder", Parameters(), "sm_90a"
            ),
        )
        assert made == b"cubin"
        return x.new_zeros(x.shape[0], 4)

    definition = definition_of(torch.ops.compile_ext.router_gemm.default)
    assert definition is not None
    kernel = next(k for k in definition.kernels if k.name == "cute")
    for name, value in (("why_not", lambda *args: None), ("run", run), ("failures", {})):
        monkeypatch.setattr(kernel, name, value)
    for other in definition.kernels[: definition.kernels.index(kernel)]:
        monkeypatch.setattr(other, "why_not", lambda *args: "not here")
    return kernel


def call() -> Tensor:
    out: Tensor = torch.ops.compile_ext.router_gemm(
        torch.ones(5, 8, dtype=torch.bfloat16), torch.ones(4, 8, dtype=torch.bfloat16), None
    )
    return out


def test_a_kernel_of_this_package(own: Any) -> None:
    with seal("error"), pytest.raises(SealError) as refused:
        call()
    event = refused.value.event
    assert (event.kind, event.op) == ("cute", "compile_ext::router_gemm")
    assert event.kernel == "seal_cute_kernel Parameters(experts=256)"
    assert event.shapes[0].endswith("bfloat16[5, 8]")
    assert "max_tokens=5" in event.fix
    assert own.failures == {}  # not given up: once the seal is lifted it runs
    assert call().sum() == 0
    with seal("error"):  # from disk
        assert call().sum() == 0


def test_a_compiler_that_fails_is_still_no_refusal(own: Any, tmp_path: Path) -> None:
    with seal("warn"), pytest.raises(KernelUnavailable, match="CuTe DSL does not compile it"):
        cute_compile.compile_cubin("seal_cute_kernel", "Nothing", Parameters(), "sm_90a")
