"""FP8 (e4m3) quantization and its inverse, in plain PyTorch, so that Inductor fuses it into its
producer.

A scale multiplies to dequantize: ``x ~ q.float() * scale``. Each scale is ``amax / 448`` of its
group, where 448 is the largest finite e4m3 value (OCP 8-bit floating point specification, E4M3). An
all-zero group gets the scale of amax = 1e-10, so that nothing divides by zero; a NaN or infinity in
a group spreads over it. With ``use_ue8m0`` a scale is rounded up to a power of two, as activations
are quantized for checkpoints with ``scale_fmt: ue8m0``; it is float32 all the same, and
``scale.to(torch.float8_e8m0fnu)`` is exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_ext.ops import column_major, ue8m0
from compile_ext.ops.checks import FP8, dtype_in, rank_is, shape_is

BLOCK = 128
FP8_MAX = 448.0
AMAX_FLOOR = 1e-10
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def quantize_fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale a token (row). Also quantizes a weight ``[n, k]`` with one scale an output channel.

    Args:
        x: ``[m, k]`` bfloat16, float16 or float32.

    Returns:
        ``q [m, k]`` float8_e4m3fn and ``scale [m, 1]`` float32.
    """
    dtype_in("quantize_fp8_per_token", "x", x, _FLOATS)
    rank_is("quantize_fp8_per_token", "x", x, 2)
    x = x.float()
    # amax refuses k = 0; a row of no elements is a zero row.
    amax = x.abs().amax(dim=-1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1)
    scale = _scale(amax)
    return _to_fp8(x / scale).contiguous(), scale  # of a transposed x too: scaled_mm needs rows


def quantize_fp8_groups(x: Tensor, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """One scale for each group of 128 features of a token; the last group may be partial.

    Args:
        x: ``[m, k]`` bfloat16, float16 or float32.
        use_ue8m0: whether scales are powers of two.

    Returns:
        ``q [m, k]`` float8_e4m3fn and ``scale [m, ceil(k/128)]`` float32 with strides
        ``(1, m rounded up to 4)``: column-major with 16-byte columns, what TMA reads.
    """
    q, scale = quantize_groups(x, use_ue8m0)
    return q, _column_major(scale)


def quantize_groups(x: Tensor, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """``quantize_fp8_groups`` with scales in rows."""
    dtype_in("quantize_fp8_groups", "x", x, _FLOATS)
    rank_is("quantize_fp8_groups", "x", x, 2)
    k = x.shape[1]
    grouped = _pad_to_blocks(x.float(), (1,)).unflatten(1, (-1, BLOCK))
    scale = _scale(grouped.abs().amax(dim=-1), use_ue8m0)
    if k % BLOCK:
        # By an index that Inductor does not see through: of a quotient by scale[m, i // 128] over a
        # k that is no multiple of 128, its C++ leaves the last k % 128 columns out (torch 2.13).
        groups = torch.arange(k, device=x.device) // BLOCK
        q = _to_fp8(x.float() / scale[:, groups])
    else:
        # as_strided and not flatten: Inductor stores in groups what it is asked for in groups, and
        # then one kernel computes scale and q. Asked for q in rows, it takes a second one.
        q = _to_fp8(grouped / scale.unsqueeze(-1)).contiguous()
        q = q.as_strided((q.shape[0], k), (k, 1))
    return q.contiguous(), scale


def quantize_fp8_blocks(w: Tensor, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """One scale for each 128x128 block of a weight; the last blocks may be partial.

    Args:
        w: ``[n, k]`` bfloat16, float16 or float32.
        use_ue8m0: whether scales are powers of two.

    Returns:
        ``q [n, k]`` float8_e4m3fn and ``scale [ceil(n/128), ceil(k/128)]`` float32.
    """
    dtype_in("quantize_fp8_blocks", "w", w, _FLOATS)
    rank_is("quantize_fp8_blocks", "w", w, 2)
    n, k = w.shape
    blocks = _pad_to_blocks(w.float(), (0, 1)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _scale(blocks.abs().amax(dim=(1, 3)), use_ue8m0)
    q = _to_fp8(blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)
    return q[:n, :k].contiguous(), scale


def dequantize_fp8_groups(q: Tensor, scale: Tensor) -> Tensor:
    """``q [..., k]`` with ``scale [..., ceil(k/128)]``, float32 or float8_e8m0fnu, as float32
    ``[..., k]``."""
    k = q.shape[-1]
    dtype_in("dequantize_fp8_groups", "q", q, (FP8,))
    shape_is("dequantize_fp8_groups", "scale", scale, (*q.shape[:-1], blocks_of(k)))
    return fp8_to_float32(q) * scale.float().repeat_interleave(BLOCK, dim=-1)[..., :k]


def dequantize_fp8_blocks(q: Tensor, scale: Tensor) -> Tensor:
    """``q [..., n, k]`` with ``scale [..., ceil(n/128), ceil(k/128)]``, float32 or float8_e8m0fnu,
    as float32 ``[..., n, k]``."""
    *lead, n, k = q.shape
    dtype_in("dequantize_fp8_blocks", "q", q, (FP8,))
    shape_is("dequantize_fp8_blocks", "scale", scale, (*lead, blocks_of(n), blocks_of(k)))
    columns = scale.float().repeat_interleave(BLOCK, dim=-1)[..., :k]
    return fp8_to_float32(q) * columns.repeat_interleave(BLOCK, dim=-2)[..., :n, :]


def fp8_to_float32(q: Tensor) -> Tensor:
    """Every e4m3 value is exact in float32; NaN stays NaN.

    On the CPU by table: PyTorch's own conversion takes 1.7 ms for 576x576, the look-up 0.4 ms (one
    AMD EPYC core).
    """
    if q.device.type != "cpu":
        return q.float()
    table = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return table.index_select(0, q.contiguous().view(torch.uint8).flatten().int()).view(q.shape)


def blocks_of(size: int) -> int:
    """How many blocks of 128 cover ``size`` elements."""
    return (size + BLOCK - 1) // BLOCK


def _scale(amax: Tensor, use_ue8m0: bool = False) -> Tensor:
    scale = amax.clamp(min=AMAX_FLOOR) / FP8_MAX
    return ue8m0.round_up(scale) if use_ue8m0 else scale


def _to_fp8(x: Tensor) -> Tensor:
    # amax / scale can round to just above 448, and conversions differ in what they make of that.
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _pad_to_blocks(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    pads = [0] * (2 * x.dim())
    for dim in dims:
        pads[2 * (x.dim() - 1 - dim) + 1] = -x.shape[dim] % BLOCK
    return F.pad(x, pads) if any(pads) else x


def _column_major(scale: Tensor) -> Tensor:
    # Traced, copy_ would guard on m % 4; the op has no gradient.
    if torch.compiler.is_compiling() and not scale.requires_grad:
        laid_out: Tensor = column_major.OP(scale)
        return laid_out
    return column_major.column_major_ref(scale)
