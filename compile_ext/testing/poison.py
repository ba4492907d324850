"""What an element may hold that nobody reads: values that a result cannot hide."""

from __future__ import annotations

import torch

from compile_ext.testing.memory import POISON_BYTE


def poisons(dtype: torch.dtype) -> dict[str, bytes]:
    """``{name: the bytes of one element}``: NaN, Inf, every byte 0xFF, the largest; for integers
    and bools 0xFF, the largest and the smallest. A pattern that two names share is listed once.
    """
    found: dict[str, bytes] = {}
    for name, pattern in _candidates(dtype):
        if pattern not in found.values():
            found[name] = pattern
    return found


def _candidates(dtype: torch.dtype) -> list[tuple[str, bytes]]:
    bytes_ff = ("0xFF bytes", bytes([POISON_BYTE]) * dtype.itemsize)
    if dtype == torch.bool:
        return [bytes_ff, ("True", b"\1"), ("False", b"\0")]
    if dtype.is_complex:
        part = dtype.to_real()
        return [(name, 2 * pattern) for name, pattern in _candidates(part)]
    if not dtype.is_floating_point:
        try:
            info = torch.iinfo(dtype)
        except TypeError:  # bits8 and the like
            return [bytes_ff, ("zero bytes", bytes(dtype.itemsize))]
        return [
            bytes_ff,
            ("the largest", _of(info.max, dtype)),
            ("the smallest", _of(info.min, dtype)),
        ]
    try:
        values = {"NaN": float("nan"), "Inf": float("inf"), "the largest": torch.finfo(dtype).max}
        # FP8 formats without Inf give NaN for it.
        return [*((name, _of(x, dtype)) for name, x in values.items()), bytes_ff]
    except (NotImplementedError, TypeError, RuntimeError):  # float4: nothing converts to it
        return [bytes_ff, ("0x77 bytes", b"\x77" * dtype.itemsize)]


def _of(value: float, dtype: torch.dtype) -> bytes:
    element = torch.tensor(value, dtype=dtype) if not dtype.is_floating_point else None
    if element is None:
        element = torch.tensor(value, dtype=torch.float64).to(dtype)
    return bytes(element.reshape(1).view(torch.uint8).tolist())
