"""Layers of norm and router, as the router's benchmarks run and check them.

A layer's norm reads what the layer before it normed, so that each kernel waits for numbers of the
one in front; each layer has weights of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compile_ext.ops.define import Kernel, definition_of
from compile_ext.tune.operands import ROUTERS

LAYERS = 40
SHAPES = ROUTERS
EPS = 1e-6
ERROR = 3e-7  # of sum |x| |w|, against float64


def kernel(op: str, name: str) -> Kernel:
    definition = definition_of(getattr(torch.ops.compile_ext, op).default)
    assert definition is not None
    return next(k for k in definition.kernels if k.name == name)


@dataclass
class Layers:
    """The weights of one shape, and what the calls of M tokens write.

    Args:
        b: ``[LAYERS, n, k]``, norms ``[LAYERS, k]``, bfloat16.
        x: of the first layer ``[m, k]``.
        y, logits: what each layer gave in the last call of ``run_all``.
    """

    b: Tensor
    norms: Tensor
    x: Tensor = field(init=False)
    y: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(n: int, k: int) -> Layers:
        b = (torch.randn(LAYERS, n, k, device="cuda") / math.sqrt(k)).bfloat16()
        return Layers(b, (torch.rand(LAYERS, k, device="cuda") + 0.5).bfloat16())

    def tokens(self, m: int) -> None:
        self.x = torch.randn(m, self.b.shape[2], device="cuda").bfloat16()

    def all_layers(
        self, layer: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> Callable[[], None]:
        """A call of ``layer(x, norm, b) -> y, logits`` for each layer."""

        def call() -> None:
            self.y, self.logits = [], []
            x = self.x
            for norm, b in zip(self.norms, self.b, strict=True):
                x, logits = layer(x, norm, b)
                self.y.append(x)
                self.logits.append(logits)

        return call

    def error(self, is_fused: bool) -> float:
        """The largest error of a logit, as a part of sum |x| |w|; infinite where a y is wrong.

        Of two kernels the router's is meant, which reads y; of one the exact norm's."""
        worst = 0.0
        before = self.x
        layers = zip(self.y, self.logits, self.norms, self.b, strict=True)
        for y, logits, norm, b in layers:
            x = before.double()
            exact = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * norm.double()
            # One rounding of y to bfloat16 is 2^-9; its norm is that of float32.
            if not bool(((y.double() - exact).abs() <= exact.abs() * 2.0**-8).all()):
                return math.inf
            a, w = exact if is_fused else y.double(), b.double()
            off = (logits.double() - a @ w.t()).abs() / (a.abs() @ w.abs().t())
            found = float(off.max())
            worst = found if not found <= worst else worst  # so written that a NaN stays
            before = y
        return worst
