"""Random operands of the dense FP8 GEMMs: the weights of several layers, and a call for each.

Several layers, so that no weight is in the L2 from the call before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compile_ext.ops import quantize_fp8_groups, quantize_fp8_per_token
from compile_ext.ops.checks import FP8
from compile_ext.ops.quantize import blocks_of

LAYERS, WEIGHT_BYTES = 40, 4 * 2**30
SHAPES = (  # N, K: DeepSeek-V3's projections and experts, a dense MLP, one with partial blocks
    (576, 7168),
    (2112, 7168),
    (24576, 1536),
    (7168, 16384),
    (4096, 7168),
    (7168, 2048),
    (21504, 5376),
    (1536, 576),
)


@dataclass(frozen=True)
class Weights:
    """The layers of one shape.

    Args:
        n, k: of each ``b [n, k]`` float8_e4m3fn, without NaN.
        b: one a layer.
        scales: of each b, float32, such that the results are near 1.
    """

    n: int
    k: int
    b: list[Tensor]
    scales: list[Tensor]


Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Operands:
    """How an op is called.

    Args:
        scale_shape: ``(n, k) -> shape`` of scale_b.
        quantize: an activation ``[m, k]`` bfloat16 to FP8 and scale_a.
    """

    scale_shape: Callable[[int, int], tuple[int, int]]
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]

    def weights(self, n: int, k: int, device: str = "cuda") -> Weights:
        layers = max(2, min(LAYERS, WEIGHT_BYTES // (n * k)))
        b = [torch.randn(n, k, device=device).to(FP8) for _ in range(layers)]
        shape = self.scale_shape(n, k)
        return Weights(
            n, k, b, [(torch.rand(shape, device=device) + 0.5) / math.sqrt(k) for _ in b]
        )

    def calls(self, weights: Weights, m: int, out_dtype: torch.dtype) -> list[Arguments]:
        """The arguments of a call for each layer: m tokens in FP8, no bias."""
        x = torch.randn(m, weights.k, device=weights.b[0].device).bfloat16()
        a, scale_a = self.quantize(x)
        pairs = zip(weights.b, weights.scales, strict=True)
        return [(a, b, scale_a, scale_b, None, out_dtype) for b, scale_b in pairs]


OPERANDS = {  # by op; the others have one kernel, or weights in groups
    "block_scaled_mm": Operands(lambda n, k: (blocks_of(n), blocks_of(k)), quantize_fp8_groups),
    "scaled_mm": Operands(lambda n, k: (n, 1), quantize_fp8_per_token),
}
