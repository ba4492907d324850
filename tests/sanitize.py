"""Run by tests/test_gpu_sanitizer.py under compute-sanitizer: odd shapes, and storages that are
swapped between calls. Prints ``clean`` at the end; wrong values are an AssertionError.

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, so that a read past
its end is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compile_ext
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import (
    dequantize_fp8_blocks,
    dequantize_fp8_groups,
    quantize_fp8_groups,
    quantize_fp8_per_token,
)

SHAPES = ((1, 16), (17, 33), (100, 64), (64, 100), (130, 200))
TOKENS = (1, 5)


def tail(p: Tensor) -> Tensor:
    """The same values at the very end of an allocation that begins elsewhere."""
    flat = torch.empty(p.numel() + 16, dtype=p.dtype, device=p.device)
    flat[16:].copy_(p.detach().view(-1))
    return flat[16:].view(p.shape)


SWAPS: dict[str, Callable[[nn.Module], Any]] = {
    "as it is": lambda m: None,
    "data =": lambda m: [setattr(p, "data", p.detach().clone()) for p in m.parameters()],
    "the end of a larger tensor": lambda m: [setattr(p, "data", tail(p)) for p in m.parameters()],
    "assign": lambda m: m.load_state_dict(
        {k: v.detach().clone() for k, v in m.state_dict().items()}, assign=True
    ),
    "to the CPU and back": lambda m: m.to("cpu").to("cuda"),
    "copy_": lambda m: [p.copy_(p.detach().clone()) for p in m.parameters()],
    "restore": lambda m: compile_ext.restore(m),
    "refresh": lambda m: compile_ext.refresh(m),
}


def exact(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, ChannelFp8Linear):
        a, scale = quantize_fp8_per_token(x)
        return (a.double() * scale) @ (layer.weight.double() * layer.weight_scale).t()
    a, scale = quantize_fp8_groups(x)
    weight = dequantize_fp8_blocks(layer.weight, layer.weight_scale)
    return dequantize_fp8_groups(a, scale).double() @ weight.double().t()


def norms() -> None:
    """Each kernel against the op's reference, with inputs at the end of their memory."""
    ops = torch.ops.compile_ext
    for m in (*TOKENS, 64):
        for k in (1, 33, 200, 2880):
            x, residual = (tail(torch.randn(m, k, device="cuda").bfloat16()) for _ in range(2))
            blocks = tail(torch.randn(m, 3, k, device="cuda").bfloat16())
            w = tail(torch.randn(k, device="cuda"))
            calls: dict[Any, tuple[Any, ...]] = {
                ops.rms_norm: (x, w, 1e-6, True),
                ops.add_rms_norm: (x, residual, w, 1e-6, True),
                ops.attn_residual: (x, blocks, w, 1e-6, w, 1e-6, True),
            }
            for op, args in calls.items():
                got, want = (op(*args, pinned=kernel) for kernel in ("triton", "reference"))
                got, want = ((t,) if isinstance(t, Tensor) else t for t in (got, want))
                for g, t in zip(got, want, strict=True):
                    # A score is off by 2^-18, and so is a weight of the mixture; then up to three
                    # roundings to bfloat16.
                    torch.testing.assert_close(g, t, rtol=2.0**-6, atol=2.0**-6)


def main() -> None:
    norms()
    for make in (ChannelFp8Linear, BlockFp8Linear):
        for n, k in SHAPES:
            torch._dynamo.reset()
            layer = make(torch.randn(n, k, device="cuda"))
            options: dict[str, Any] = {"compile_ext.inner": "eager"}
            call = torch.compile(
                lambda x, f=layer: F.relu(f(x)), backend="compile_ext", options=options
            )
            for swap in SWAPS.values():
                swap(layer)
                for m in TOKENS:
                    x = torch.randn(m, k, device="cuda").bfloat16()
                    got, want = call(x).double(), F.relu(exact(layer, x))
                    # Rounding to bfloat16, and the tensor cores' accumulation (test_gpu.py). 1e-3
                    # for results that are all zero behind the relu: a sum just below zero can
                    # come out just above it.
                    limit = 2.0**-7 * (want.abs() + want.abs().mean() + 1e-3)
                    assert bool(((got - want).abs() <= limit).all()), (make.__name__, n, k, m)
    torch.cuda.synchronize()
    print("clean")


if __name__ == "__main__":
    with torch.no_grad():
        main()
