"""Linear layers on the FP8 ops, as building blocks for models: weights are quantized once, at
construction, or come quantized.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compile_ext.ops import (
    block_scaled_mm,
    quantize_fp8_blocks,
    quantize_fp8_groups,
    quantize_fp8_per_token,
    scaled_mm,
)
from compile_ext.ops.block_scaled_reference import check_scale_b
from compile_ext.ops.checks import FP8, dtype_in, rank_is


class BlockFp8Linear(nn.Module):
    """A linear layer with one weight scale for each 128x128 block. The op quantizes the activation;
    compiled, ``quantize_activations`` puts that into the graph, where it fuses.

    Args:
        weight: ``[n, k]`` bfloat16, float16 or float32; any sizes, the last blocks may be partial.
        bias: ``[n]`` or None.
        use_ue8m0: whether scales are powers of two, those of the activation too. Then ``forward``
            quantizes it: the op would go by the dtype of scale_b, which is float32 here.

    Parameters: ``weight [n, k]`` float8_e4m3fn and ``weight_scale [ceil(n/128), ceil(k/128)]``
    float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, use_ue8m0: bool = False) -> None:
        super().__init__()
        self._hold(*quantize_fp8_blocks(weight.detach(), use_ue8m0), bias, use_ue8m0)

    @classmethod
    def from_checkpoint(
        cls,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
        use_ue8m0: bool = False,
    ) -> BlockFp8Linear:
        """A layer whose weight is quantized already; it shares the weight's memory.

        Args:
            weight: ``[n, k]`` float8_e4m3fn.
            weight_scale: ``[ceil(n/128), ceil(k/128)]`` float32 or float8_e8m0fnu, which multiplies
                to dequantize (``weight_scale_inv`` in DeepSeek's checkpoints). Kept as float32,
                which is exact, and which all kernels read.
            bias: ``[n]`` or None.
            use_ue8m0: True where the checkpoint's ``quantization_config`` says
                ``scale_fmt: ue8m0``.

        Raises:
            DtypeError, RankError, ShapeError.
        """
        dtype_in(cls.__name__, "weight", weight, (FP8,))
        rank_is(cls.__name__, "weight", weight, 2)
        check_scale_b(cls.__name__, weight, weight_scale)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._hold(weight.detach(), weight_scale.detach().float(), bias, use_ue8m0)
        return layer

    def _hold(self, weight: Tensor, scale: Tensor, bias: Tensor | None, use_ue8m0: bool) -> None:
        self.use_ue8m0 = use_ue8m0
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = (
            None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., k]`` bfloat16 -> ``[..., n]`` bfloat16."""
        rows, scale = x.reshape(-1, x.shape[-1]), None
        if self.use_ue8m0:
            rows, scale = quantize_fp8_groups(rows, use_ue8m0=True)
        out = block_scaled_mm(rows, self.weight, scale, self.weight_scale, self.bias, x.dtype)
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
