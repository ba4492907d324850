"""UE8M0 scales: powers of two from 2^-127 to 2^127.

As float8_e8m0fnu, a byte is the exponent with a bias of 127: there is no zero and no infinity, and
0xFF is NaN (OCP Microscaling Formats 1.0, section 5.4). Checkpoints with ``scale_fmt: ue8m0``
(DeepSeek-V3.1 and later) store them so, or as float32. Both convert exactly to float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

E8M0 = torch.float8_e8m0fnu
SCALES = (torch.float32, E8M0)  # what the block-scaled ops take


def round_up(scale: Tensor) -> Tensor:
    """Float32 scales, positive and no subnormals, rounded up to powers of two in float32; NaN and
    infinity stay. By the bits: a logarithm close to a whole number rounds to it."""
    power = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(power < scale, power * 2, scale)


def why_not(**scales: Tensor | None) -> str | None:
    """Why a kernel that reads float32 scales cannot read these, or None."""
    for name, scale in scales.items():
        if scale is not None and scale.dtype == E8M0:
            return f"reads float32 scales, {name} is float8_e8m0fnu"
    return None
