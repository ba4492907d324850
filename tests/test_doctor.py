"""``compile-ext doctor``: what is missing, and what to do about it."""

from __future__ import annotations

import platform

import pytest
import torch
from typer.testing import CliRunner

from compile_ext.cli import app
from compile_ext.doctor import Finding, examine
from compile_ext.ops import deep_gemm_support, triton_support


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


def test_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm_support, "why_not", lambda: "does not load")
    monkeypatch.setattr(deep_gemm_support, "nvcc", lambda: None)
    assert found("DeepGEMM").reason == "does not load"
    assert str(found("nvcc").reason).startswith("was not found: install NVIDIA's CUDA toolkit")


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(deep_gemm_support, "why_not", lambda: "does not load")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for one in examine():
        assert one.name in result.output
        assert (one.reason or "ok") in result.output
