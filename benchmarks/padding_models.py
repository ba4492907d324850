"""What bench_padding.py compares: one FP8 linear in its place, padded in five ways."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from measuring import DEVICE
from torch import Tensor, nn

from compile_ext.ops import quantize_fp8_per_token, scaled_mm
from compile_ext.tune.timing import Call

COLUMNS = ("each call", "vLLM", "vLLM, fused", "nothing left", "compile_ext")


@dataclass(frozen=True)
class Case:
    n: int
    k: int
    bias: bool
    is_head: bool = False


CASES = (
    Case(3420, 1280, True),
    Case(1280, 3420, True),
    Case(50257, 768, False, is_head=True),
    Case(4300, 4096, False),
)


def up(size: int) -> int:
    return -(-size // 16) * 16


def produce(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_fp8_per_token(F.gelu(x))


def read(y: Tensor, residual: Tensor | None) -> Tensor:
    return y.amax(-1) if residual is None else y + residual


class Linear(nn.Module):
    """The linear in its place, with its weights as a checkpoint stores them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        w, scale = quantize_fp8_per_token(torch.randn(case.n, case.k, device=DEVICE))
        self.w, self.scale = (nn.Parameter(t, requires_grad=False) for t in (w, scale))
        bias = torch.randn(case.n, device=DEVICE).bfloat16() if case.bias else None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        a, scale = produce(x)
        return read(scaled_mm(a, self.w, scale, self.scale, self.bias), residual)


def pad_last(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - x.shape[-1]))


class PadEachCall(Linear):
    def pad_weight(self) -> tuple[Tensor, Tensor]:
        n, k = self.w.shape
        w = F.pad(self.w, (0, up(k) - k, 0, up(n) - n))
        return w, F.pad(self.scale, (0, 0, 0, up(n) - n), value=1.0)

    def gemm(self, a: Tensor, scale: Tensor) -> Tensor:
        return self._multiply(a, scale, *self.pad_weight())

    def _multiply(self, a: Tensor, scale: Tensor, w: Tensor, scale_b: Tensor) -> Tensor:
        n = self.w.shape[0]
        bias = None if self.bias is None else pad_last(self.bias, w.shape[0])
        out = scaled_mm(pad_last(a, w.shape[1]), w, scale, scale_b, bias)
        return out[:, :n].contiguous() if w.shape[0] != n else out


class PadAtLoad(PadEachCall):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.padded, self.padded_scale = self.pad_weight()

    def gemm(self, a: Tensor, scale: Tensor) -> Tensor:
        return self._multiply(a, scale, self.padded, self.padded_scale)


class Padded(PadAtLoad):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.padded_bias = None if self.bias is None else pad_last(self.bias, up(case.n))

    def gemm(self, a: Tensor, scale: Tensor) -> Tensor:
        out = scaled_mm(a, self.padded, scale, self.padded_scale, self.padded_bias)
        return out[:, : self.w.shape[0]]


compiled_produce = torch.compile(produce, dynamic=False)
compiled_read = torch.compile(read, dynamic=False)


def pieces(model: PadEachCall, x: Tensor, residual: Tensor | None) -> Call:
    """Producer and reader compiled, what is between them as ATen ops."""
    return lambda: compiled_read(model.gemm(*compiled_produce(x)), residual)


@dataclass(frozen=True)
class Column:
    call: Call
    model: Linear
    x: Tensor
    residual: Tensor | None


def build(case: Case, m: int) -> dict[str, Column]:
    x = torch.randn(m, case.k, device=DEVICE).bfloat16()
    residual = None if case.is_head else torch.randn(m, case.n, device=DEVICE).bfloat16()
    each, load, ours = PadEachCall(case), PadAtLoad(case), Linear(case)
    fused, stored = PadAtLoad(case), Padded(case)
    long = pad_last(x, up(case.k))

    def whole(model: PadEachCall, x: Tensor) -> Tensor:
        return read(model.gemm(*produce(x)), residual)

    run_whole = torch.compile(whole, dynamic=False)
    run_ours = torch.compile(ours, backend="compile_ext", dynamic=False)
    calls: dict[str, tuple[Call, Linear]] = {
        "each call": (pieces(each, x, residual), each),
        "vLLM": (pieces(load, x, residual), load),
        "vLLM, fused": (lambda: run_whole(fused, x), fused),
        "nothing left": (lambda: run_whole(stored, long), stored),
        "compile_ext": (lambda: run_ours(x, residual), ours),
    }
    return {name: Column(call, model, x, residual) for name, (call, model) in calls.items()}
