"""What an element may hold that nobody reads: values that a result cannot hide."""

from __future__ import annotations

import torch

from compile_ext.testing.memory import poison_pattern


def poisons(dtype: torch.dtype) -> dict[str, bytes]:
    """``{name: the bytes of one element}``: NaN, Inf, the largest, the smallest, zero, poison.
    A minimum with the argument (``min(amax, scale_ub)``) shows below zero alone, a test for
    zero at zero alone. A pattern that two names share is listed once.
    """
    found: dict[str, bytes] = {}
    for name, pattern in _candidates(dtype):
        if pattern not in found.values():
            found[name] = pattern
    return found


def _candidates(dtype: torch.dtype) -> list[tuple[str, bytes]]:
    poison = poison_pattern(dtype)
    poisoned = (f"0x{poison[0]:02X} bytes", poison)
    zero = ("zero", bytes(dtype.itemsize))
    if dtype == torch.bool:
        return [poisoned, ("True", b"\1"), ("False", b"\0")]
    if dtype.is_complex:
        part = dtype.to_real()
        return [(name, 2 * pattern) for name, pattern in _candidates(part)]
    if not dtype.is_floating_point:
        try:
            info = torch.iinfo(dtype)
        except TypeError:  # bits8 and the like
            return [poisoned, zero]
        return [
            poisoned,
            ("the largest", _of(info.max, dtype)),
            ("the smallest", _of(info.min, dtype)),
            zero,
        ]
    try:
        limits = torch.finfo(dtype)
        values = {
            "NaN": float("nan"),
            "Inf": float("inf"),
            "the largest": limits.max,
            "the smallest": limits.min,
        }
        # FP8 formats without Inf give NaN for it.
        return [*((name, _of(x, dtype)) for name, x in values.items()), zero, poisoned]
    except (NotImplementedError, TypeError, RuntimeError):  # float4: nothing converts to it
        return [poisoned, ("0x77 bytes", b"\x77" * dtype.itemsize), zero]


def _of(value: float, dtype: torch.dtype) -> bytes:
    # Not on the default device, which may be another.
    exact = torch.float64 if dtype.is_floating_point else dtype
    element = torch.tensor(value, dtype=exact, device="cpu").to(dtype)
    return bytes(element.reshape(1).view(torch.uint8).tolist())
