"""A readable decoder with random weights: grouped-query attention, block-FP8 linears, a mixture of
experts.

Written as serving code is, so that the passes find work: the norms compute with their weights on
each call, the experts hand their op a placeholder scale, the router is a bfloat16 linear with a
cast behind it, and the vocabulary of the LM head is no multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import block_scaled_mm, quantize_fp8_blocks


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder; the vocabulary is GPT-2's, 50257 = 16 * 3141 + 1."""

    vocab: int = 50257
    hidden: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 512
    experts: int = 4
    experts_per_token: int = 2
    max_tokens: int = 128


def _weight(n: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, k, generator=generator) / k**0.5


def _quantized(weight: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(x, requires_grad=False) for x in quantize_fp8_blocks(weight)]


class RMSNorm(nn.Module):
    """With the weight stored as its distance from one, as in Gemma."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), eps=1e-6)
        return (normed * (1 + self.weight.float())).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and a KV cache of fixed size."""

    k_cache: Tensor
    v_cache: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, c: Config, g: torch.Generator) -> None:
        super().__init__()
        self.c = c
        width = (c.heads + 2 * c.kv_heads) * c.head_dim
        self.qkv_proj = BlockFp8Linear(_weight(width, c.hidden, g))
        self.o_proj = BlockFp8Linear(_weight(c.hidden, c.heads * c.head_dim, g))
        shape = (c.kv_heads, c.max_tokens, c.head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape, dtype=torch.bfloat16), persistent=False)
        inverse = 10000.0 ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.outer(torch.arange(c.max_tokens), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # x [m, hidden], positions [m]
        c = self.c
        q, k, v = self.qkv_proj(x).split(
            [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], dim=-1
        )
        q = self._rotate(q.unflatten(-1, (c.heads, c.head_dim)), positions).transpose(0, 1)
        k = self._rotate(k.unflatten(-1, (c.kv_heads, c.head_dim)), positions).transpose(0, 1)
        v = v.unflatten(-1, (c.kv_heads, c.head_dim)).transpose(0, 1)
        self.k_cache[:, positions] = k
        self.v_cache[:, positions] = v
        mask = torch.arange(c.max_tokens, device=x.device) <= positions[:, None]  # [m, max_tokens]
        keys, values = self.k_cache[None], self.v_cache[None]
        out = F.scaled_dot_product_attention(q[None], keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out[0].transpose(0, 1).flatten(1))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:  # x [m, heads, head_dim]
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        first, second = x.float().chunk(2, dim=-1)
        return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Expert(nn.Module):
    """SwiGLU on block-FP8 weights, as an engine's wrapper calls its kernel: with a placeholder
    activation scale.
    """

    def __init__(self, c: Config, g: torch.Generator) -> None:
        super().__init__()
        self.gate_up, self.gate_up_scale = _quantized(_weight(2 * c.ffn, c.hidden, g))
        self.down, self.down_scale = _quantized(_weight(c.hidden, c.ffn, g))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._mm(x, self.gate_up, self.gate_up_scale).chunk(2, dim=-1)
        return self._mm(F.silu(gate) * up, self.down, self.down_scale)

    def _mm(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        unread = x.new_ones(1)  # the kernel quantizes a bfloat16 x itself
        return block_scaled_mm(x, weight, unread, scale)


class Router(nn.Module):
    def __init__(self, c: Config, g: torch.Generator) -> None:
        super().__init__()
        self.top_k = c.experts_per_token
        # Times 4: decisive, so that the scores of two experts seldom lie within rounding.
        weight = _weight(c.experts, c.hidden, g) * 4
        self.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The weight of each expert for each token, ``[m, experts]``; zero for those not chosen."""
        scores = F.linear(x, self.weight).float().softmax(-1)
        top, chosen = torch.topk(scores, self.top_k)
        return torch.zeros_like(scores).scatter(-1, chosen, top / top.sum(-1, keepdim=True))


class MixtureOfExperts(nn.Module):
    """Every expert sees every token and the router's weights decide: simple, with no shape that
    depends on data.
    """

    def __init__(self, c: Config, g: torch.Generator) -> None:
        super().__init__()
        self.router = Router(c, g)
        self.experts = nn.ModuleList(Expert(c, g) for _ in range(c.experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (outputs * weights.unsqueeze(-1)).sum(1)


class Layer(nn.Module):
    def __init__(self, c: Config, g: torch.Generator, sparse: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(c.hidden), RMSNorm(c.hidden)
        self.attention = Attention(c, g)
        self.mlp = MixtureOfExperts(c, g) if sparse else Expert(c, g)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """``forward(tokens [m], positions [m]) -> logits [m, vocab]`` float32; every second layer is
    sparse.
    """

    def __init__(self, c: Config | None = None, seed: int = 0) -> None:
        super().__init__()
        self.c = c = c or Config()
        g = torch.Generator().manual_seed(seed)
        embedding = torch.randn(c.vocab, c.hidden, generator=g).bfloat16()
        self.embedding = nn.Embedding.from_pretrained(embedding)
        self.layers = nn.ModuleList(Layer(c, g, sparse=i % 2 == 1) for i in range(c.layers))
        self.norm = RMSNorm(c.hidden)
        self.lm_head = ChannelFp8Linear(_weight(c.vocab, c.hidden, g) * 3)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return self.lm_head(self.norm(x), torch.float32)

    def caches(self) -> list[Tensor]:
        """The KV caches of all layers, keys and values in turn."""
        attentions = [m for m in self.modules() if isinstance(m, Attention)]
        return [cache for a in attentions for cache in (a.k_cache, a.v_cache)]
