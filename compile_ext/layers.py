"""Linear layers on the FP8 ops, as building blocks for models: weights are quantized once, at
construction.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compile_ext.ops import (
    block_scaled_mm,
    quantize_fp8_blocks,
    quantize_fp8_per_token,
    scaled_mm,
)


class BlockFp8Linear(nn.Module):
    """A linear layer with one weight scale for each 128x128 block; the op quantizes the activation
    itself, or compiled, what computes it (``quantize_activations``).

    Args:
        weight: ``[n, k]`` bfloat16, float16 or float32; any sizes, the last blocks may be partial.
        bias: ``[n]`` or None.

    Parameters: ``weight [n, k]`` float8_e4m3fn and ``weight_scale [ceil(n/128), ceil(k/128)]``
    float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        quantized, scale = quantize_fp8_blocks(weight.detach())
        self.weight = nn.Parameter(quantized, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = (
            None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., k]`` bfloat16 -> ``[..., n]`` bfloat16."""
        rows = x.reshape(-1, x.shape[-1])
        out = block_scaled_mm(rows, self.weight, None, self.weight_scale, self.bias, x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])


class ChannelFp8Linear(nn.Module):
    """A linear layer with one weight scale an output channel and one activation scale a token.

    Args:
        weight: ``[n, k]`` bfloat16, float16 or float32.
        bias: ``[n]`` or None.

    Parameters: ``weight [n, k]`` float8_e4m3fn and ``weight_scale [n, 1]`` float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        quantized, scale = quantize_fp8_per_token(weight.detach())
        self.weight = nn.Parameter(quantized, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = (
            None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        )

    def forward(self, x: Tensor, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """``x [..., k]`` bfloat16, float16 or float32 -> ``[..., n]`` of out_dtype."""
        rows, scale = quantize_fp8_per_token(x.reshape(-1, x.shape[-1]))
        out = scaled_mm(rows, self.weight, scale, self.weight_scale, self.bias, out_dtype)
        return out.view(*x.shape[:-1], out.shape[-1])
