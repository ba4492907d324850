"""The devices that Triton kernels run on: the GPU, or Triton's interpreter where there is none."""

from __future__ import annotations

import pytest
import torch

# On a GPU Triton compiles for it, and its interpreter is off: one of the two, never both.
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
