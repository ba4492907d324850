"""What a kernel wants of the device."""

from __future__ import annotations

import torch
from torch import Tensor

Capability = tuple[int, int]


def why_not(x: Tensor, wanted: Capability, *, exactly: bool = False) -> str | None:
    """Why a CUDA kernel for this compute capability, or newer ones, cannot run where x is."""
    if x.device.type != "cuda":
        return f"runs on CUDA, the tensors are on {x.device.type}"
    found = torch.cuda.get_device_capability(x.device)
    if found != wanted if exactly else found < wanted:
        want, have = (".".join(map(str, x)) for x in (wanted, found))
        return f"needs compute capability {want}, the device has {have}"
    return None
