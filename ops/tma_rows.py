"""What TMA wants of a matrix, and so cuBLASLt and DeepGEMM: rows at multiples of 16 bytes."""

from __future__ import annotations

from torch import Tensor

from compile_ext.ops.checks import Size

ROW_BYTES = 16


def why_not(**matrices: Tensor) -> str | None:
    """Why a kernel cannot address these matrices ``[..., rows, columns]``, or None.

    An allocation begins at such an address; whether a view does, its offset says. A symbol counts
    as what fits: it is a number when the kernel runs, and is asked again.
    """
    for name, x in matrices.items():
        columns = x.shape[-1]
        for stride in x.stride()[:-1]:
            if _is_odd(stride * x.element_size()):
                return f"needs row strides in multiples of {ROW_BYTES} bytes, {name} has {stride}"
            if type(stride) is int and type(columns) is int and stride < columns:
                return f"needs rows that do not overlap, {name} has a row stride of {stride}"
        if _is_odd(x.storage_offset() * x.element_size()):
            return f"needs an address in multiples of {ROW_BYTES} bytes, {name} is a view"
    return None


def _is_odd(size: Size) -> bool:
    return type(size) is int and size % ROW_BYTES != 0
