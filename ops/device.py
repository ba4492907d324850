"""What a kernel wants of the device, and the GPU that is asked about where none is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

Capability = tuple[int, int]


@dataclass(frozen=True)
class Target:
    """The GPU to compile for, which need not be here.

    Args:
        capability: its compute capability.
        gpu: its name, as the driver gives it; "" for any of this capability.
        multiprocessors: how many it has: some kernels are compiled for the number.
    """

    capability: Capability
    gpu: str = ""
    multiprocessors: int = 132  # of an H100 (SXM) and an H200

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    @staticmethod
    def here(index: int) -> Target:
        """CUDA device ``index``."""
        found = torch.cuda.get_device_properties(index)
        return Target((found.major, found.minor), found.name, found.multi_processor_count)


_TARGET: ContextVar[Target | None] = ContextVar("compile_ext_target", default=None)


def target() -> Target | None:
    """The GPU that tensors of the device ``meta`` stand for in this thread, if any."""
    return _TARGET.get()


@contextmanager
def as_if_on(target: Target) -> Iterator[None]:
    """Inside, in this thread, tensors of the device ``meta`` count as tensors of this GPU: to ask
    which kernel would run, and what it would launch."""
    token = _TARGET.set(target)
    try:
        yield
    finally:
        _TARGET.reset(token)


def is_gpu(x: Tensor) -> bool:
    """Whether ``x`` is on a GPU, or stands for a tensor that is."""
    return x.is_cuda or (x.is_meta and _TARGET.get() is not None)


def capability(x: Tensor) -> Capability | None:
    """Of the GPU that ``x`` is on; None where it is on none."""
    if x.is_cuda:
        return torch.cuda.get_device_capability(x.device)
    meant = _TARGET.get() if x.is_meta else None
    return None if meant is None else meant.capability


def why_not(x: Tensor, wanted: Capability, *, exactly: bool = False) -> str | None:
    """Why a CUDA kernel for this compute capability, or newer ones, cannot run where x is."""
    found = capability(x)
    if found is None:
        return f"runs on CUDA, the tensors are on {x.device.type}"
    if found != wanted if exactly else found < wanted:
        want, have = (".".join(map(str, x)) for x in (wanted, found))
        return f"needs compute capability {want}, the device has {have}"
    return None
