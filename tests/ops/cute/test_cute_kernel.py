"""A CuTe DSL kernel from its source to its launch, with a compiler and a driver that are fakes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from call_sites import H200

from compile_ext.ops import compiled_cache, cute_compile, cute_kernel, cute_support, launches
from compile_ext.ops.cute_kernel import CuteKernel
from compile_ext.ops.errors import KernelUnavailable

HOPPER = (9, 0)


class Parameters(NamedTuple):
    k: int
    threads: int = 128
    cluster: int = 2


def on_cuda(index: int = 0) -> Any:
    """A tensor on a CUDA device, for what asks where it is."""
    device = torch.device("cuda", index)
    return SimpleNamespace(device=device, is_cuda=True, get_device=lambda: index)


class Compiler:
    """In place of ``compile_cubin``: notes what it compiles."""

    def __init__(self, image: bytes) -> None:
        self.image = image
        self.compiled: list[tuple[Any, ...]] = []

    def __call__(self, *what: Any) -> bytes:
        self.compiled.append(what)
        return self.image


def forget() -> None:
    """What is asked once in a process."""
    for asked in (cute_support.compiler, cute_support.why_no_compiler, cute_kernel._capability):
        asked.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(cute_support, "release_of", lambda package: release)
    forget()


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, make_image: Any, cache: Path) -> Iterator[Compiler]:
    fake = Compiler(make_image(8, 4))
    monkeypatch.setattr(cute_compile, "compile_cubin", fake)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    install(monkeypatch, "4.8.1")
    yield fake
    forget()


def kernel() -> CuteKernel:
    """As a new process has it."""
    return CuteKernel("router_dot_cute_kernel", "RouterDot", "Pi")


def test_a_launch_compiles_loads_and_launches(driver: Any, compiler: Compiler) -> None:
    kernel().launch(on_cuda(), Parameters(7168), 33, 0x1000, 256, pdl=True)
    module = "router_dot_cute_kernel"
    assert compiler.compiled == [(module, "RouterDot", Parameters(7168), "sm_90a")]
    last = driver.last
    assert (last.grid[0], last.block[0], last.cluster[0], last.pdl) == (33, 128, 2, 1)
    assert struct.unpack("<Qi", bytes(last.params)[:12]) == (0x1000, 256)


def test_a_kernel_is_loaded_once_and_compiled_once(driver: Any, compiler: Compiler) -> None:
    first = kernel()
    for k in (7168, 7168, 4096, 7168):
        first.launch(on_cuda(), Parameters(k), 1, 0, 0, pdl=False)
    first.launch(on_cuda(1), Parameters(7168), 1, 0, 0, pdl=False)
    assert [x[2].k for x in compiler.compiled] == [7168, 4096]
    assert driver.calls.fake_loads() == 2
    kernel().launch(on_cuda(), Parameters(7168), 1, 0, 0, pdl=False)
    assert len(compiler.compiled) == 2
    assert driver.calls.fake_loads() == 3
    assert driver.calls.fake_launches() == 6


def test_what_a_kernel_depends_on_is_in_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    key = kernel().key(Parameters(7168), (9, 0))
    assert key == kernel().key(Parameters(7168), (9, 0))
    others = [
        kernel().key(Parameters(4096), (9, 0)),
        kernel().key(Parameters(7168, threads=256), (9, 0)),
        kernel().key(Parameters(7168), (10, 0)),
    ]
    monkeypatch.setattr(cute_kernel, "source_hash", lambda *_: "edited")
    others.append(kernel().key(Parameters(7168), (9, 0)))
    assert len({x.digest for x in [key, *others]}) == 5


LISTED = """from compile_ext.ops import (  # noqa: F401
    a as b,  # one
    c,
)
x = 1
"""


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import compile_ext.ops.a", ["a"]),
        ("    import compile_ext.ops.a as b", ["a"]),
        ("from compile_ext.ops.a import f, g", ["a"]),
        ("from compile_ext.ops import a, c as b", ["a", "c"]),
        (LISTED, ["a", "c"]),
        ("from compile_ext.passes import a\n# from compile_ext.ops import b", []),
        ("import cutlass\nfrom compile_ext.opsy import a", []),
    ],
)
def test_every_form_of_an_import(source: str, modules: list[str]) -> None:
    found = [x.removeprefix("compile_ext.ops.") for x in cute_kernel._imports(source.encode())]
    assert found == modules


def test_the_source_of_a_kernel_is_all_that_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        "kernel": "import cutlass\nfrom compile_ext.ops import tiles\n",
        "tiles": "def f():\n    from compile_ext.ops.shuffles import g\n",
        "shuffles": "import compile_ext.ops.kernel\n",
        "host": "from compile_ext.ops import elsewhere\n",
        "cute_compile": "",
    }

    def source(module: str) -> bytes:
        return sources[module.removeprefix("compile_ext.ops.")].encode()

    monkeypatch.setattr(cute_kernel, "_source", source)

    def now() -> str:
        cute_kernel.source_hash.cache_clear()
        return cute_kernel.source_hash("kernel", "compile_ext.ops.host")

    hashes = {now()}
    for name in sources:
        sources[name] += "# edited\n"
        hashes.add(now())
    assert len(hashes) == 6
    cute_kernel.source_hash.cache_clear()


def test_a_kernel_compiled_ahead_is_what_a_call_then_finds(driver: Any, compiler: Compiler) -> None:
    assert kernel().prepare(Parameters(7168), HOPPER) is True
    assert kernel().prepare(Parameters(7168), HOPPER) is False
    kernel().launch(on_cuda(), Parameters(7168), 1, 0, 0, pdl=False)
    assert len(compiler.compiled) == 1


def test_a_launch_is_noted_by_what_is_compiled_for_it() -> None:
    with launches.recording(H200) as noted:
        for k in (7168, 4096, 7168):
            kernel().launch(torch.empty(1, device="meta"), Parameters(k), 1, 0, 0, pdl=False)
    assert [x.kernel for x in noted] == ["router_dot_cute_kernel"] * 3
    first, second, again = (x.key for x in noted)
    assert first == again != second
    other = kernel().launch_of(Parameters(7168), (10, 0))
    assert other.key != first


@pytest.mark.parametrize("release", ["4.7.1", "3.9.0"])
def test_an_old_cute_dsl_is_none(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, release)
    reason = kernel().why_not(on_cuda(), Parameters(7168))
    assert str(reason).startswith(f"CuTe DSL {release} is older than 4.8: pip install 'compile-ext")


@pytest.mark.parametrize("release", ["4.8.0", "4.10.1.post1", "5.0"])
def test_a_newer_cute_dsl_compiles(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, release)
    assert cute_support.compiler() == f"{release}+cu13"
    assert kernel().why_not(on_cuda(), Parameters(7168)) is None


def test_without_cute_dsl_a_kernel_on_disk_runs(
    driver: Any, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel().prepare(Parameters(7168), HOPPER)
    install(monkeypatch, "")
    here = kernel()
    assert here.why_not(on_cuda(), Parameters(7168)) is None
    here.launch(on_cuda(), Parameters(7168), 1, 0, 0, pdl=False)
    assert len(compiler.compiled) == 1
    reason = here.why_not(on_cuda(), Parameters(4096))
    assert reason is not None
    assert "CuTe DSL is not installed: pip install 'compile-ext[cuda]'" in reason
    assert str(compiled_cache.folder()) in reason
    with pytest.raises(KernelUnavailable, match="not installed"):
        here.launch(on_cuda(), Parameters(4096), 1, 0, 0, pdl=False)
    with pytest.raises(KernelUnavailable, match="not installed"):
        here.prepare(Parameters(4096), HOPPER)


def test_a_damaged_kernel_is_compiled_anew(driver: Any, compiler: Compiler) -> None:
    kernel().launch(on_cuda(), Parameters(7168), 1, 0, 0, pdl=False)
    (file,) = compiled_cache.folder().glob("*.bin")
    file.write_bytes(file.read_bytes()[:-1])
    kernel().launch(on_cuda(), Parameters(7168), 1, 0, 0, pdl=False)
    assert len(compiler.compiled) == 2


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (torch.device("cpu"), "runs on CUDA, the tensors are on cpu"),
        (torch.device("cuda", 0), "needs compute capability 9.0, the device has 8.9"),
    ],
)
def test_a_device_that_cannot_run_it_is_the_reason(
    where: torch.device, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    x: Any = SimpleNamespace(device=where, is_cuda=where.type == "cuda", is_meta=False)
    assert kernel().why_not(x, Parameters(7168)) == reason
