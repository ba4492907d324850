"""A seal and DeepGEMM: a stand-in that starts its compiler as the library does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_ext import CompileEvent, SealError, seal
from compile_ext.ops import block_scaled_mm, deep_gemm_nvcc, deep_gemm_support
from compile_ext.ops.define import definition_of
from compile_ext.ops.errors import KernelUnavailable
from compile_ext.ops.quantize import quantize_fp8_blocks, quantize_fp8_groups

NVCC = """#!/bin/sh
echo "$@" >>{log}
case "$*" in
*--version*) echo Cuda compilation tools, release 13.0, V13.0.48 ;;
*) [ -e {broken} ] && exit 2; while [ "$1" != -o ]; do shift; done; echo cubin >"$2" ;;
esac
"""
SOURCE = """#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>
static void __instantiate_kernel() {
    auto ptr = reinterpret_cast<void*>(&sm90_fp8_gemm_1d2d_impl<0, %d, 0>);
};
"""
FAILED = 'Assertion error (/build/csrc/jit/compiler.hpp:214): false and "NVCC compilation failed"'


class Library(ModuleType):
    """What the library does in C++: the compiler is named once, and compiles what the cache lacks
    in a folder of its own, which is then renamed."""

    def __init__(self, home: Path, cache: Path) -> None:
        super().__init__("deep_gemm")
        self.__spec__ = object()  # type: ignore[assignment]
        self.home, self.cache, self.compiler = home, cache / "cache", ""

    def fp8_gemm_nt(self, a: Any, b: Any, out: Tensor) -> None:
        if not self.compiler:
            self.compiler = os.environ.get("DG_JIT_NVCC_COMPILER") or f"{self.home}/bin/nvcc"
            subprocess.run([self.compiler, "--version"], check=True, stdout=subprocess.DEVNULL)
        tile = 16 if a[0].shape[0] <= 16 else 64
        entry = self.cache / f"kernel.{tile}"
        if not entry.exists():
            made = self.cache.parent / f"tmp{time.monotonic_ns()}"
            made.mkdir(parents=True)
            (made / "kernel.cu").write_text(SOURCE % tile)
            command = f"cd {made} && {self.compiler} {made}/kernel.cu -cubin -o {made}/kernel.cubin"
            if subprocess.run(command, shell=True, capture_output=True).returncode:
                raise RuntimeError(FAILED)
            self.cache.mkdir(exist_ok=True)
            made.rename(entry)
        out.zero_()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_deep_gemm: None) -> Library:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(NVCC.format(log=tmp_path / "log", broken=tmp_path / "broken"))
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    found = Library(home, tmp_path / "cache")
    deep_gemm_nvcc.stand_between(nvcc)  # before the library is there
    monkeypatch.setitem(sys.modules, "deep_gemm", found)
    kernel = next(k for k in definition().kernels if k.name == "deep_gemm")
    monkeypatch.setattr(kernel, "why_not", lambda *args: None)
    monkeypatch.setattr(kernel, "failures", {})
    return found


def definition() -> Any:
    return definition_of(torch.ops.compile_ext.block_scaled_mm.default)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight, scale = quantize_fp8_blocks(torch.randn(64, 128))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        a, scale = quantize_fp8_groups(x)
        return block_scaled_mm(a, self.weight, scale, self.scale)


@pytest.fixture
def net() -> nn.Module:
    return nn.ModuleDict({"mlp": nn.ModuleDict({"down": Linear()})})


def call(net: Any, m: int) -> Tensor:
    out: Tensor = net["mlp"]["down"](torch.ones(m, 128))
    return out


def compiles(tmp_path: Path) -> int:
    log = tmp_path / "log"
    return log.read_text().count("-cubin") if log.exists() else 0


def test_a_compile_is_refused_and_no_other_kernel_taken(
    library: Library, net: nn.Module, tmp_path: Path
) -> None:
    with seal("error"), pytest.raises(SealError):
        call(net, 5)
    with seal("error"), pytest.raises(SealError) as refused:
        call(net, 5)
    event = refused.value.event
    assert (event.kind, event.kernel) == ("deep_gemm", "sm90_fp8_gemm_1d2d_impl")
    assert event.op == "compile_ext::block_scaled_mm"
    assert event.modules == ("mlp.down",)
    assert event.shapes[:2] == ("a: float8_e4m3fn[5, 128]", "b: float8_e4m3fn[64, 128]")
    assert "compile_ext.warmup(model, max_tokens=5)" in event.fix
    assert len(event.key) == 32
    assert compiles(tmp_path) == 0
    assert call(net, 5).sum() == 0  # the same kernel, once the seal is lifted
    assert compiles(tmp_path) == 1
    with seal("error"):  # from the cache
        call(net, 16)
        with pytest.raises(SealError):
            call(net, 17)
    assert compiles(tmp_path) == 1


def test_a_callback_hears_of_it_and_the_call_goes_on(
    library: Library, net: nn.Module, heard: list[CompileEvent], tmp_path: Path
) -> None:
    with seal(heard.append):
        call(net, 5)
        call(net, 6)
        call(net, 17)
    assert [(e.kind, e.op, e.modules) for e in heard] == [
        ("deep_gemm", "compile_ext::block_scaled_mm", ("mlp.down",))
    ] * 2
    assert heard[0].key != heard[1].key
    assert compiles(tmp_path) == 2


def test_without_a_seal_a_compiler_that_fails_gives_the_kernel_up(
    library: Library, net: nn.Module, tmp_path: Path, heard: list[CompileEvent]
) -> None:
    (tmp_path / "broken").touch()
    arguments: Any = [torch.empty(5, 128)], [torch.empty(64, 128)], torch.empty(5, 64)
    with pytest.raises(KernelUnavailable, match="NVCC compilation failed"):
        deep_gemm_support.call("fp8_gemm_nt", *arguments)
    with seal(heard.append), pytest.raises(KernelUnavailable, match="NVCC compilation failed"):
        deep_gemm_support.call("fp8_gemm_nt", *arguments)
    assert [e.kind for e in heard] == ["deep_gemm"]


def test_a_compiler_of_the_user_is_kept(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, net: nn.Module
) -> None:
    own = tmp_path / "own nvcc"
    own.write_text(f"#!/bin/sh\ntouch '{tmp_path}/own was called'\nexec {library.home}/bin/nvcc $*")
    own.chmod(0o755)
    monkeypatch.setenv(deep_gemm_nvcc.COMPILER, str(own))
    deep_gemm_nvcc.stand_between(library.home / "bin" / "nvcc")
    with seal("error"), pytest.raises(SealError):
        call(net, 5)
    call(net, 5)
    assert (tmp_path / "own was called").exists()


def test_a_compiler_that_is_not_there_is_replaced(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bin = library.home / "bin"
    monkeypatch.setenv("PATH", str(bin), prepend=os.pathsep)
    # A process that got one of the two variables, or both and another file system; the script of
    # another installation, which would call itself; a name on PATH.
    other = tmp_path / "other" / deep_gemm_nvcc.SCRIPT.name
    other.parent.mkdir()
    other.write_text("#!/bin/sh")
    other.chmod(0o755)
    for script in (deep_gemm_nvcc.SCRIPT, other):
        for real, kept in (
            ("", bin / "nvcc"),
            (tmp_path / "gone", bin / "nvcc"),
            (other, bin / "nvcc"),
            ("nvcc", "nvcc"),
        ):
            monkeypatch.setenv(deep_gemm_nvcc.COMPILER, str(script))
            monkeypatch.setenv(deep_gemm_nvcc.REAL, str(real))
            deep_gemm_nvcc.stand_between(bin / "nvcc")
            assert os.environ[deep_gemm_nvcc.REAL] == str(kept)
            assert os.environ[deep_gemm_nvcc.COMPILER] == str(deep_gemm_nvcc.SCRIPT)


def test_a_process_that_the_sealed_one_has_started_is_not_sealed(
    library: Library, tmp_path: Path
) -> None:
    """A worker of a warmup: it inherits the environment."""
    source = tmp_path / "kernel.cu"
    source.write_text(SOURCE % 16)
    worker = (
        "import os, sys; sys.exit(os.WEXITSTATUS(os.system("
        f"'cd {tmp_path} && {deep_gemm_nvcc.SCRIPT} {source} -cubin -o {tmp_path}/k.cubin')))"
    )
    with seal("error"):
        done = subprocess.run([sys.executable, "-c", worker])
    assert done.returncode == 0
    assert (tmp_path / "k.cubin").exists()


def test_where_the_library_came_first_its_cache_is_watched(
    library: Library, net: nn.Module, monkeypatch: pytest.MonkeyPatch, heard: list[CompileEvent]
) -> None:
    monkeypatch.setattr(deep_gemm_nvcc, "_was_first", False)
    library.compiler = f"{library.home}/bin/nvcc"  # has been read
    with seal(heard.append):
        call(net, 5)
    assert [(e.kind, e.kernel) for e in heard] == [("deep_gemm", "sm90_fp8_gemm_1d2d_impl")]
    with pytest.raises(SealError), seal("error"):  # noqa: PT012
        call(net, 17)
        call(net, 5)
    with seal("error"):
        call(net, 17)


def test_what_others_compile_is_told_a_moment_later(
    library: Library, heard: list[CompileEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    from compile_ext.sealing import deep_gemm

    monkeypatch.setattr(deep_gemm, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(deep_gemm, "_LEFT_SECONDS", 0.1)
    arguments: Any = [torch.empty(5, 128)], [torch.empty(64, 128)], torch.empty(5, 64)
    with seal(heard.append):
        library.fp8_gemm_nt(*arguments)
        until = time.monotonic() + 20
        while not heard and time.monotonic() < until:
            time.sleep(0.02)
    assert [(e.kind, e.op) for e in heard] == [("deep_gemm", "")]


def test_nothing_is_left_of_the_seal(library: Library, tmp_path: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob("compile_ext_seal_*"))
    with seal("warn"):
        assert set(Path(tempfile.gettempdir()).glob("compile_ext_seal_*")) != before
    assert set(Path(tempfile.gettempdir()).glob("compile_ext_seal_*")) == before
    assert deep_gemm_nvcc.SEAL not in os.environ
    assert deep_gemm_nvcc.watcher is None
