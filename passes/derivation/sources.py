"""Which tensors a constant may be derived from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def why_not(source: Any) -> str | None:
    """Why no constant may be derived from this tensor, or None."""
    if not isinstance(source, Tensor):
        return f"it is a {type(source).__name__}, not a tensor"
    if type(source) not in (Tensor, torch.nn.Parameter) and not isinstance(source, FakeTensor):
        return f"it is a tensor subclass ({type(source).__name__})"
    if source.layout != torch.strided:
        return f"its layout is {source.layout}"
    if source.is_inference():
        return "it is an inference tensor: without a version counter an update could not be seen"
    if source.numel() == 0:
        return "it has no elements"
    return None
