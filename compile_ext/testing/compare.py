"""The first element in which two tensors differ: by bits, or by more than rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_ext.check import ABSOLUTE_OF_MAX, RELATIVE
from compile_ext.passes.values import dtype_name

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class Difference:
    """``found`` where ``wanted`` should be, as texts.

    Args:
        at: the element, as an index: ``[1, 2]``; "" for the whole.
    """

    found: str
    wanted: str
    at: str = ""

    def of(self, name: str) -> str:
        return f"{name}{self.at} {self.found}"


def bits_differ(got: Any, want: Any) -> Difference | None:
    """NaNs are equal if their bits are. What is no tensor is compared by type and text."""
    if (form := _forms_differ(got, want, strides=True)) or not isinstance(got, Tensor):
        return form
    wrong = (_bytes(got) != _bytes(want)).any(-1).reshape(got.shape)
    return _first(wrong, got, want)


def values_differ(got: Any, want: Any, relative: float) -> Difference | None:
    """Beyond ``relative`` of the element plus the same part of the largest one; NaN equals NaN."""
    if (form := _forms_differ(got, want, strides=False)) or not isinstance(got, Tensor):
        return form
    x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (got, want))
    magnitude = y.abs()
    finite = magnitude[magnitude.isfinite()]
    largest = finite.amax() if finite.numel() else magnitude.new_zeros(())
    limit = relative * magnitude + relative * largest
    wrong = ~((x - y).abs() <= limit) & ~(x.isnan() & y.isnan()) & (x != y)
    return _first(wrong, got, want)


def tolerance(result: Any, arguments: list[Tensor], device: str) -> float:
    """What another kernel may differ by, of an element and of the largest element.

    It may round once more to the result's dtype (an eps), and add the same products in another
    order. An integer has nothing to round.
    """
    if not isinstance(result, Tensor) or not (result.is_floating_point() or result.is_complex()):
        return 0.0
    rounding = torch.finfo(result.dtype).eps
    dtypes = {x.dtype for x in arguments if x.is_floating_point() or x.is_complex()}
    if device == "cuda" and dtypes & set(_FLOAT8):
        # The FP8 tensor cores of SM90 accumulate with about 14 bits; seen on an H200 for K up to
        # 7168: 0.0031 of the largest element.
        return max(rounding, RELATIVE, ABSOLUTE_OF_MAX)
    if device == "cuda" and torch.float32 in dtypes:
        return max(rounding, 2.0**-9)  # TF32 rounds what it multiplies to 2^-11 each
    if result.dtype in (torch.float64, torch.complex128) and not dtypes - {result.dtype}:
        return 2.0**-40  # K products and sums, 2^-53 each
    return max(rounding, 2.0**-14)  # float32: 2^-24 each, for K up to about a thousand


def _forms_differ(got: Any, want: Any, *, strides: bool) -> Difference | None:
    found, wanted = _form(got, strides), _form(want, strides)
    return None if found == wanted else Difference(f"is {found}", wanted)


def _form(x: Any, strides: bool) -> str:
    if not isinstance(x, Tensor):
        return f"{x!r} ({type(x).__name__})"
    text = f"{dtype_name(x)} of shape {list(x.shape)}"
    return f"{text}, strides {list(x.stride())}" if strides else text


def _bytes(x: Tensor) -> Tensor:
    """``[elements, bytes of one]``"""
    # A dimension of size 1 may keep any stride in contiguous(), and a view to bytes minds.
    flat = x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)
    return flat.reshape(x.numel(), x.element_size())


def _first(wrong: Tensor, got: Tensor, want: Tensor) -> Difference | None:
    if not wrong.any():
        return None
    at = tuple(int(i) for i in wrong.nonzero()[0])
    found, wanted = _element(got[at]), _element(want[at])
    if found == wanted:  # -0.0 and NaNs with other bits are printed alike
        found, wanted = (f"{t} (0x{_bytes(x[at]).flip(-1).numpy().tobytes().hex()})"
                         for t, x in ((found, got), (wanted, want)))  # fmt: skip
    count = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
    return Difference(f"is {found}, {count}", wanted, str(list(at)) if at else "")


def _element(x: Tensor) -> str:
    try:
        value = x.item()
    except (NotImplementedError, RuntimeError):  # float4
        return f"0x{_bytes(x).flip(-1).numpy().tobytes().hex()}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
