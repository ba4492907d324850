"""Random operands of the dense GEMMs: the weights of several layers, and a call for each.

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
ROUTERS = (  # N, K: DeepSeek-V3, Kimi K2 and K3, GLM-4.5, Qwen3, gpt-oss, and their like
    (256, 7168), (384, 7168), (896, 7168), (256, 6144), (160, 5120), (256, 4096), (128, 4096),
    (128, 2880), (128, 2048), (64, 2048),
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """The layers of one shape.

    Args:
        n, k: of each ``b [n, k]``, float8_e4m3fn or bfloat16, without NaN.
        b: one a layer.
        scales: of each b, float32, such that the results are near 1; none where b is bfloat16.
    """

    n: int
    k: int
    b: list[Tensor]
    scales: list[Tensor]


Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Fp8:
    """How an FP8 GEMM is called.

    Args:
        scale_shape: ``(n, k) -> shape`` of scale_b.
        quantize: an activation ``[m, k]`` bfloat16 to FP8 and scale_a.
        shapes: N and K that are measured where none are named.
    """

    scale_shape: Callable[[int, int], tuple[int, int]]
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
    shapes: tuple[tuple[int, int], ...] = SHAPES

    def weights(self, n: int, k: int, device: str = "cuda") -> Weights:
        b = [torch.randn(n, k, device=device).to(FP8) for _ in range(_layers(n * k))]
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


class Router:
    """How the router GEMM is called."""

    shapes = ROUTERS

    def weights(self, n: int, k: int, device: str = "cuda") -> Weights:
        layers = range(_layers(2 * n * k))
        b = [(torch.randn(n, k, device=device) / math.sqrt(k)).bfloat16() for _ in layers]
        return Weights(n, k, b, [])

    def calls(self, weights: Weights, m: int, out_dtype: torch.dtype) -> list[Arguments]:
        """The arguments of a call for each layer: m tokens, no bias. The logits are float32."""
        a = torch.randn(m, weights.k, device=weights.b[0].device).bfloat16()
        return [(a, b, None) for b in weights.b]


Operands = Fp8 | Router


def _layers(nbytes: int) -> int:
    return max(2, min(LAYERS, WEIGHT_BYTES // nbytes))


OPERANDS: dict[str, Operands] = {  # by op; the others have one kernel, or weights in groups
    "block_scaled_mm": Fp8(lambda n, k: (blocks_of(n), blocks_of(k)), quantize_fp8_groups),
    "scaled_mm": Fp8(lambda n, k: (n, 1), quantize_fp8_per_token),
    "router_gemm": Router(),
}
