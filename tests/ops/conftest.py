"""What the tests of the grouped and batched FP8 ops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

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
