"""``compile-ext doctor``: what is missing, and what to do about it."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from compile_ext.cli import app
from compile_ext.doctor import Finding, examine
from compile_ext.ops import cute_support, deep_gemm_support, device_tables, triton_support
from compile_ext.ops.device_tables import DeviceTables, Machine
from compile_ext.ops.kernel_table import Table


def found(name: str) -> Finding:
    [one] = [x for x in examine() if x.name == name]
    return one


def test_versions() -> None:
    assert found("Python").found == platform.python_version()
    assert found("torch").found == torch.__version__
    assert found("torch").reason is None


def test_a_cpu_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert found("CUDA device").reason == "this torch is a CPU build: install a CUDA build"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: ("H200", "T4")[i])
    none = DeviceTables(HERE, None, None, ())
    monkeypatch.setattr(device_tables, "tables_of", lambda i: none)
    assert found("CUDA device 0").found == "H200, compute capability 9.0"
    assert found("CUDA device 0").reason is None
    assert found("CUDA device 1").reason == "no kernel runs below compute capability 8.0"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert found("CUDA device").reason == "no device: look at what nvidia-smi says"


def test_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "is_installed", lambda: False)
    assert str(found("Triton").reason).startswith("pip install triton")
    monkeypatch.setattr(triton_support, "is_installed", lambda: True)
    assert found("Triton").reason is None


def test_cute_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_support, "why_no_compiler", lambda: "is too old")
    assert found("CuTe DSL").reason == "is too old, where the kernels are not on disk"
    monkeypatch.setattr(cute_support, "why_no_compiler", lambda: None)
    assert found("CuTe DSL").reason is None


def test_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm_support, "why_not", lambda: "does not load")
    monkeypatch.setattr(deep_gemm_support, "nvcc", lambda: None)
    assert found("DeepGEMM").reason == "does not load"
    assert str(found("nvcc").reason).startswith("was not found: install NVIDIA's CUDA toolkit")


HERE = Machine("sm_90", "NVIDIA H200", {"driver": "580.1", "torch": "2.13"})
TABLE = Table("sm_90", "NVIDIA H200", HERE.versions, "2026-11-30", "compile-ext tune", ())
OLDER = Table(
    "sm_90", "NVIDIA H100", {"driver": "580.1", "torch": "2.11"}, "2026-11-29", "tune", ()
)
TABLES = {  # the user's, the shipped one, problems; what is found, and the reason
    "none": ((None, None, ()), "", "none for NVIDIA H200, so each op's own order holds: "),
    "measured here": (
        (TABLE, OLDER, ()),
        "measured here of 2026-11-30, shipped of 2026-11-29",
        None,
    ),
    "shipped, and fits": ((None, TABLE, ()), "shipped of 2026-11-30", None),
    "shipped, of others": (
        (None, OLDER, ()),
        "shipped of 2026-11-29",
        "measured with NVIDIA H100, here NVIDIA H200; torch 2.11, here 2.13: compile-ext tune",
    ),
    "broken": ((None, TABLE, ("x.json: no JSON: not used",)), "shipped of", "x.json: no JSON"),
}


@pytest.mark.parametrize(("tables", "shown", "reason"), TABLES.values(), ids=TABLES)
def test_kernel_tables(
    tables: Any, shown: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H200")
    monkeypatch.setattr(device_tables, "tables_of", lambda i: DeviceTables(HERE, *tables))
    one = found("kernel table 0")
    assert one.found.startswith(shown)
    assert (one.reason is None) == (reason is None)
    assert (one.reason or "").startswith(reason or "")


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(deep_gemm_support, "why_not", lambda: "does not load")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for one in examine():
        assert one.name in result.output
        assert (one.reason or "ok") in result.output
