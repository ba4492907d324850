"""The devices that Triton kernels run on: the GPU, or Triton's interpreter where there is none."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from gluon_on_torch import Launch

# On a GPU Triton compiles for it, and its interpreter is off: one of the two, never both.
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, torch runs what is written in Gluon, which has no interpreter."""
    if not torch.cuda.is_available():
        module = import_module("compile_ext.ops.block_scaled_mm_small_m")
        monkeypatch.setattr(module, "_small_m_kernel", Launch(module, "_small_m_kernel"))
