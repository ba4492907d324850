"""What a CuTe DSL kernel loads before its PDL wait, and that it stores nothing there."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from call_sites import H200, norm_router, router, units

from compile_ext.ops import cute_support
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.cute_compiler import CUTE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None,
        reason=f"CuTe DSL is not installed: {cute_support.INSTALL}",
    ),
]
# Of each kernel, its pointers by position: what is read before the wait, after it, and written.
DOT = ({"weight": 2, "b": 3}, {"x": 0, "residual": 1, "bias": 4}, {"y": 5, "total": 6, "out": 7})
MMA = ({"b": 1}, {"a": 0, "bias": 2}, {"out": 3})
POINTERS = {"router_dot_cute_kernel": DOT, "router_mma_cute_kernel": MMA}
SHAPES = [(256, 7168, False), (128, 2880, False), (257, 4104, True)]

Compiled = Callable[[CompileUnit], tuple[str, bytes]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Compiled:
    """The PTX and the cubin of a unit."""
    cute = importlib.import_module("cutlass.cute")
    original, kept = cute.compile, []

    def compile(*args: Any, options: str) -> Any:
        result = original(*args, options=f"{options} --keep-ptx")
        folder = Path(options.split()[-1])
        kept.extend(next(folder.glob(f"*.{x}")).read_bytes() for x in ("ptx", "cubin"))
        return result

    def of(unit: CompileUnit) -> tuple[str, bytes]:
        kept.clear()
        cache.mkdir(parents=True, exist_ok=True)
        CUTE.compile(unit, H200, cache)
        ptx, cubin = kept
        return ptx.decode(), cubin

    monkeypatch.setattr(cute, "compile", compile)
    return of


def accesses(ptx: str) -> list[tuple[str, set[int]]]:
    """Loads from and stores to global memory, the wait among them: (kind, the kernel's parameters
    that the address is computed from)."""
    sources: dict[str, set[int]] = {}  # of a register
    found: list[tuple[str, set[int]]] = []
    for line in ptx.splitlines():
        text = line.strip()
        if text.startswith("griddepcontrol."):
            found.append((text.rstrip(";").removeprefix("griddepcontrol."), set()))
            continue
        made = re.match(r"(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);", text)
        if made is None:
            continue
        name, operands = made.groups()
        registers = re.findall(r"%\w+", operands)
        if name.startswith(("ld.global", "st.global")):
            address = re.findall(r"\[(%\w+)", operands)[0]
            found.append((name[:2], sources.get(address, set())))
        elif name.startswith("ld.param"):
            parameter = re.search(r"_param_(\d+)\]", operands)
            assert parameter is not None
            sources[registers[0]] = {int(parameter[1])}
        elif registers and not name.startswith(("ld", "st", "bra")):
            read = set[int]().union(*(sources.get(x, set()) for x in registers[1:]))
            sources[registers[0]] = sources.get(registers[0], set()) | read
    return found


def pointers(at: set[int], *groups: dict[str, int]) -> set[str]:
    return {name for group in groups for name, i in group.items() if i in at}


def assert_order(kernel: str, order: list[tuple[str, set[int]]], *, bias: bool) -> None:
    weights, reads, writes = POINTERS[kernel]
    kinds = [kind for kind, _ in order]
    assert sorted(x for x in kinds if x not in ("ld", "st")) == ["launch_dependents", "wait"]
    wait = kinds.index("wait")
    assert "st" not in kinds[:wait]
    loads = [at for kind, at in order[:wait] if kind == "ld"]
    assert all(len(pointers(at, weights)) == 1 for at in loads)
    assert pointers(set().union(*loads), reads, writes) == set()
    loads = [at for kind, at in order[wait:] if kind == "ld"]
    assert pointers(set().union(*loads), weights) == set()
    token = {"x", "a"} & set(reads)
    assert pointers(set().union(*loads), reads) - {"residual"} == token | (
        {"bias"} if bias else set()
    )
    stores = [at for kind, at in order[wait:] if kind == "st"]
    assert all(len(pointers(at, writes)) == 1 for at in stores)
    assert "out" in pointers(set().union(*stores), writes)


def spills(cubin: bytes, tool: Path, file: Path) -> tuple[int, int]:
    """Bytes of stack and of local memory that a thread has."""
    file.write_bytes(cubin)
    done = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    [found] = re.findall(r"STACK:(\d+).* LOCAL:(\d+)", done.stdout)
    return int(found[0]), int(found[1])


@pytest.mark.parametrize(("n", "k", "bias"), SHAPES)
@pytest.mark.parametrize("site", [router, norm_router])
def test_before_the_wait_it_loads_its_weights_alone_and_no_register_spills(
    site: Any, n: int, k: int, bias: bool, compiled: Compiled, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton", reason="its wheel brings cuobjdump")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = units(site(n, k, "bfloat16" if bias else None), "cute", 64)
    assert found
    for unit in found:
        ptx, cubin = compiled(unit)
        assert_order(unit.kernel, accesses(ptx), bias=bias)
        assert spills(cubin, tool, tmp_path / "kernel.cubin") == (0, 0)
