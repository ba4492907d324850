"""A small model with the calls of a DeepSeek layer, real or on the device ``meta``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compile_ext
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops.device import Target, as_if_on

H200 = Target((9, 0), "NVIDIA H200")


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class Layer(nn.Module):
    """Block FP8: N, K of o_proj 256, 512; of gate_up_proj 512, 256; of down_proj 256, 256."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = BlockFp8Linear(torch.randn(256, 512) / 22)
        self.norm = Norm(256)
        self.gate_up_proj = BlockFp8Linear(torch.randn(512, 256) / 16)
        self.down_proj = BlockFp8Linear(torch.randn(256, 256) / 16)
        self.gate = nn.Linear(256, 8, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.o_proj(x))
        weights = self.gate(h).float().softmax(-1).topk(2)[0].sum(-1, keepdim=True)
        gate, up = self.gate_up_proj(h).chunk(2, dim=-1)
        return (self.down_proj(F.silu(gate) * up) * weights).repeat(1, 2).bfloat16()


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.lm_head = ChannelFp8Linear(torch.randn(50, 512) / 22)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def tokens(m: int = 5, device: str = "cpu", most: int = 4096) -> Tensor:
    """``[m, 512]`` bfloat16, of which M is dynamic where it is no 1."""
    x = torch.ones(m, 512, dtype=torch.bfloat16, device=device)
    if m > 1:
        torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
    return x


@functools.cache  # some seconds each
def on_h200(layers: int, *sizes: int) -> compile_ext.Manifest:
    """What a model calls on an H200, for each of these numbers of tokens."""
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Model(layers)
    with torch.no_grad(), as_if_on(H200):
        return [compile_ext.collect(model, tokens(m, "meta")) for m in sizes][-1]


def modules(manifest: compile_ext.Manifest) -> dict[str, Any]:
    """op -> the module paths of its sites."""
    found: dict[str, Any] = {}
    for site in manifest.sites:
        name = site.call.op.removeprefix("compile_ext::").removesuffix(".default")
        found.setdefault(name, []).extend(site.modules)
    return found
