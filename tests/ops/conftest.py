"""What the tests of the grouped and batched FP8 ops share, and a machine that has DeepGEMM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_ext.ops import define

Dequantize64 = Callable[[Tensor, Tensor, int], Tensor]
RunWithoutValues = Callable[..., Tensor]


@pytest.fixture
def dequantize64() -> Dequantize64:
    """``(q [..., n, k], scale, rows)`` in float64; a scale stands for ``rows`` x 128 elements."""

    def dequantize(q: Tensor, scale: Tensor, rows: int) -> Tensor:
        n, k = q.shape[-2:]
        of_row, of_column = torch.arange(n) // rows, torch.arange(k) // 128
        return q.double() * scale.double()[..., of_row, :][..., of_column]

    return dequantize


@pytest.fixture
def run_without_values() -> RunWithoutValues:
    """Call a function on fakes of its arguments: what asks a tensor for a value, for which a host
    would have to wait for its device, raises."""

    def run(function: Callable[..., Tensor], *args: Any) -> Tensor:
        with FakeTensorMode() as mode:
            return function(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args))

    return run


@pytest.fixture
def deep_gemm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh_deep_gemm: None
) -> pytest.MonkeyPatch:
    """A machine on which a ``deep_gemm`` without functions loads: a test adds those that it calls,
    or takes something away."""
    module = ModuleType("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    module.__spec__ = object()  # type: ignore[assignment]
    compiler = tmp_path / "cuda" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.48\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    # A call that finds a function missing gives the kernel up: for this test alone.
    for kernel in (k for x in define.definitions() for k in x.kernels if k.name == "deep_gemm"):
        monkeypatch.setattr(kernel, "failures", {})
        monkeypatch.setattr(kernel, "why_not", kernel.why_not)  # put back at the end
    return monkeypatch
