"""CuTe DSL compiles the kernels for Hopper, without a GPU; where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from call_sites import H200, router, units

from compile_ext.ops import cute_compile, cute_support
from compile_ext.ops.cute_compiler import CUTE
from compile_ext.ops.errors import KernelUnavailable

installed = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None,
    reason=f"CuTe DSL is not installed: {cute_support.INSTALL}",
)
SHAPES = [(256, 7168), (896, 7168), (160, 5120), (128, 2880), (64, 2048), (1, 8), (257, 4104)]


@installed
@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_router_compiles(n: int, k: int, bias: bool, cache: Path) -> None:
    found = units(router(n, k, "bfloat16" if bias else None), "cute", 8192)
    assert found
    cache.mkdir(parents=True)
    for unit in found:
        CUTE.compile(unit, H200, cache)
    files = [x.read_bytes() for x in cache.glob("*.bin")]
    assert len(files) == len(found)
    assert all(b"\n\x7fELF" in x for x in files)


class Gemv:
    """A kernel of a fake CuTe DSL, whose ``cute.compile`` writes what it is told to."""

    def __init__(self, cubins: tuple[bytes, ...]) -> None:
        self.cubins = cubins

    def arguments(self) -> tuple[str, ...]:
        return ("a", "n")


def fake_compile(kernel: Gemv, *arguments: str, options: str) -> None:
    assert arguments == ("a", "n", "stream")
    *said, folder = options.split()
    assert said == ["--gpu-arch", "sm_90a", "--keep-cubin", "--dump-dir"]
    if not kernel.cubins:
        raise ValueError("\x1b[91m\n  what is wrong\x1b[0m\nand much more")
    for i, cubin in enumerate(kernel.cubins):
        Path(folder, f"{i}.cubin").write_bytes(cubin)


@pytest.fixture
def fake_cute(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(make_fake_stream=lambda: "stream")
    monkeypatch.setitem(sys.modules, "cutlass.cute", SimpleNamespace(compile=fake_compile))
    monkeypatch.setitem(sys.modules, "cutlass.cute.runtime", runtime)
    monkeypatch.setitem(sys.modules, "compile_ext.ops.gemv", SimpleNamespace(Gemv=Gemv))


@pytest.mark.usefixtures("fake_cute")
def test_the_cubin_is_what_the_compiler_leaves() -> None:
    assert cute_compile.compile_cubin("gemv", "Gemv", (b"cubin",), "sm_90a") == b"cubin"


@pytest.mark.usefixtures("fake_cute")
@pytest.mark.parametrize(
    ("cubins", "reason"), [((), "what is wrong"), ((b"a", b"b"), "it leaves 2 cubins, wanted 1")]
)
def test_what_the_compiler_says_is_the_reason(cubins: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(KernelUnavailable) as raised:
        cute_compile.compile_cubin("gemv", "Gemv", cubins, "sm_90a")
    assert str(raised.value) == f"CuTe DSL does not compile it ({reason})"


def test_a_cute_dsl_that_does_not_load_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass.cute", None)
    with pytest.raises(KernelUnavailable, match=r"cutlass\.cute"):
        cute_compile.compile_cubin("router_dot_cute_kernel", "RouterDot", (), "sm_90a")
