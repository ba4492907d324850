"""The layers: shapes, no tokens at all, and the same numbers as the ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import block_scaled_mm, quantize_fp8_per_token, scaled_mm

LAYERS = [BlockFp8Linear, ChannelFp8Linear]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (2, 3), (2, 0, 3), ()], ids=str)
def test_every_leading_shape(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    layer = kind(torch.randn(50, 144), torch.randn(50))
    x = torch.randn(*shape, 144).bfloat16()
    out = layer(x)
    assert out.shape == (*shape, 50)
    assert out.dtype == torch.bfloat16
    rows = [layer(row[None])[0] for row in x.reshape(-1, 144)]
    if rows:
        assert torch.equal(out.reshape(-1, 50), torch.stack(rows))


def test_numbers_are_those_of_the_ops() -> None:
    weight, bias, x = torch.randn(50, 144), torch.randn(50), torch.randn(5, 144).bfloat16()
    block, channel = BlockFp8Linear(weight, bias), ChannelFp8Linear(weight, bias)
    want = block_scaled_mm(x, block.weight, None, block.weight_scale, bias)
    assert torch.equal(block(x), want)
    rows, scale = quantize_fp8_per_token(x)
    want = scaled_mm(rows, channel.weight, scale, channel.weight_scale, bias, torch.float32)
    assert torch.equal(channel(x, torch.float32), want)


@pytest.mark.parametrize("kind", LAYERS)
def test_state_is_weight_scale_and_bias_without_gradients(kind: type[nn.Module]) -> None:
    layer = kind(torch.randn(50, 144), torch.randn(50))
    assert set(layer.state_dict()) == {"weight", "weight_scale", "bias"}
    assert not any(p.requires_grad for p in layer.parameters())
