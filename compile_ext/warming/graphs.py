"""The graphs of a model: Inductor's own kernels, and CUDA graphs of given batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def warm_graphs(model: Any, batch_sizes: Sequence[int]) -> None:
    """Compile the graph of each batch size, and capture it."""
    raise NotImplementedError
