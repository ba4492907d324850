"""Lay scales out column-major in 16-byte columns, as TMA reads them, for any number of tokens.

    out[m, g] = scale[m, g], with strides (1, m rounded up to 4)

What ``empty_strided`` and ``copy_`` do. Traced with a symbolic m, that ``copy_`` asks whether the
buffer is dense, which guards on m % 4: two graphs for one. Nobody asks that of an op's result.
Inductor computes it where it computes the scale (``register_lowering``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from compile_ext.ops import checks
from compile_ext.ops.contract import OpContract
from compile_ext.ops.define import Kernel, define_op, never

NAME = "column_major"


def column_major_ref(scale: Tensor) -> Tensor:
    return _fake(scale).copy_(scale)


def _check(scale: Tensor) -> None:
    checks.dtype_in(NAME, "scale", scale, (torch.float32,))
    checks.rank_is(NAME, "scale", scale, 2)


def _fake(scale: Tensor) -> Tensor:
    m = scale.shape[0]
    return scale.new_empty_strided(scale.shape, (1, (m + 3) // 4 * 4))


OP = define_op(
    f"{NAME}(Tensor scale) -> Tensor",
    check=_check,
    fake=_fake,
    kernels=(Kernel("reference", why_not=never, run=column_major_ref, compiles=False),),
    contract=OpContract(),
)


@functools.cache
def register_lowering() -> None:
    """Tell Inductor that the op is a copy: pointwise, so it fuses. The strides are those of the
    fake, which the ops that read it ask for."""
    from torch._inductor import lowering  # loads Inductor, seconds

    def lower(scale: Any, pinned: str | None = None) -> Any:
        return lowering.clone(scale)

    lowering.register_lowering(OP, type_promotion_kind=None)(lower)
