"""Copies of tensors that keep what a kernel can see of memory: strides, offsets, overlap, gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from compile_ext.passes.derivation.uninitialised import poison_byte

# An integer of the same size, to look at bits; complex128 stands for 16 bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# What lies around a tensor in ``guarded``, in bytes. Behind it more: a kernel runs over an end more
# often than it starts too early. Both keep the alignment that a CUDA allocation has.
_BEFORE, _BEHIND, _ALIGNMENT = 4096, 65536, 512


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def storage_id(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def as_bytes(x: Tensor) -> Tensor:
    """The whole storage of ``x`` as uint8, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def copied(tree: Any, device_of: Callable[[Tensor], torch.device | str] | None = None) -> Any:
    """``tree`` with copies of its tensors: same strides and offsets, storages shared as before.

    Args:
        device_of: where the copy of a tensor goes; without, it stays on its device.
    """
    memory: dict[int, Tensor] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        device = torch.device(device_of(x)) if device_of else x.device
        known = memory.get(storage_id(x))
        if known is None:
            known = torch.empty_like(as_bytes(x), device=device).copy_(as_bytes(x))
            memory[storage_id(x)] = known
        return _placed(known, x.dtype, int(x.storage_offset()), x.shape, x.stride())

    with torch.no_grad():
        return pytree.tree_map(copy, tree)


def _placed(
    memory: Tensor, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), offset, tuple(shape), tuple(stride))


def elements(x: Tensor) -> Tensor:
    """Where the elements of ``x`` lie in its storage, in elements: int64 ``[x.numel()]``."""
    at = torch.tensor([x.storage_offset()], device=x.device)
    for size, step in zip(x.shape, x.stride(), strict=True):
        at = (at[:, None] + torch.arange(size, device=x.device) * step).reshape(-1)
    return at


def storage_bits(x: Tensor) -> Tensor:
    """The storage of ``x`` as integers of the size of its elements, sharing its memory."""
    size, memory = x.element_size(), as_bytes(x)
    return memory[: memory.numel() // size * size].view(_BITS[size])


def fill(x: Tensor, pattern: bytes) -> None:
    """Write the bytes of one element into every element of ``x``, expanded or overlapping."""
    value = torch.frombuffer(bytearray(pattern), dtype=torch.uint8).to(x.device)
    storage_bits(x)[elements(x)] = value.view(_BITS[x.element_size()])


def filled(x: Tensor, pattern: bytes) -> Tensor:
    """A copy of ``x``, in a storage of its own, whose elements hold ``pattern``."""
    copy: Tensor = copied(x)
    fill(copy, pattern)
    return copy


def poison_pattern(dtype: torch.dtype) -> bytes:
    """The bytes of one poisoned element: NaN in every float that has one (not in float4), -1 in
    integers."""
    return bytes([poison_byte(dtype)]) * dtype.itemsize


def poisoned_copy(x: Tensor) -> Tensor:
    return filled(x, poison_pattern(x.dtype))


def guarded(x: Tensor, byte: int | None = None) -> Tensor:
    """A copy of ``x`` whose memory before, behind and between its elements holds ``byte``; without,
    poison."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    size = x.element_size()
    lead = _BEFORE + x.storage_offset() * size % _ALIGNMENT
    total = lead + (last + 1) * size + _BEHIND
    memory = torch.full(
        (total,), poison_byte(x.dtype) if byte is None else byte, dtype=torch.uint8, device=x.device
    )
    copy = _placed(memory, x.dtype, lead // size, x.shape, x.stride())
    storage_bits(copy)[elements(copy)] = storage_bits(x)[elements(x)]
    return copy


def covered(x: Tensor) -> Tensor:
    """Which bytes of the storage of ``x`` are its elements: bool ``[bytes]``."""
    size = x.element_size()
    found = torch.zeros_like(as_bytes(x), dtype=torch.bool)
    found[(elements(x)[:, None] * size + torch.arange(size, device=x.device)).reshape(-1)] = True
    return found
