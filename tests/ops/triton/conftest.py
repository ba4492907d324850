"""The devices that Triton kernels run on: the GPU, or Triton's interpreter where there is none."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton compiles for the GPU here: no interpreter")
    return name
