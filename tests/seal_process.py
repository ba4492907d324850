"""One compile of one kind, through the real compiler: refused, heard, or loaded from its cache.

    python tests/seal_process.py KIND refuse|hear|load

Run by ``test_gpu_seal.py``, each in a process of its own. Prints a JSON object: the events, and
whether the result was right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from compile_ext import CompileEvent, SealError, seal
from compile_ext.ops.quantize import quantize_fp8_blocks, quantize_fp8_groups

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = torch.ops.compile_ext
Call = Callable[[], Tensor]


class Fp8Linear(nn.Module):
    """As ``block_scaled_mm`` computes it with one of its kernels."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        weight, scale = quantize_fp8_blocks(torch.randn(1024, 512, device=DEVICE))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor, kernel: str | None = None) -> Tensor:
        a, scale = quantize_fp8_groups(x)
        out: Tensor = OPS.block_scaled_mm(
            a, self.weight, scale, self.scale, None, torch.bfloat16, pinned=kernel or self.kernel
        )
        return out


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(64, 2048, device=DEVICE).bfloat16()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor, kernel: str = "cute") -> Tensor:
        out: Tensor = OPS.router_gemm(x, self.weight, None, pinned=kernel)
        return out


def kernel_of_an_op(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Call, Call]:
    model = nn.ModuleDict({"layer": layer})
    return model, lambda: layer(x), lambda: layer(x, kernel="reference")


def graph(backend: Any) -> tuple[nn.Module, Call, Call]:
    model = nn.Sequential(nn.Linear(64, 32), nn.SiLU()).requires_grad_(False).to(DEVICE)
    x, compiled = torch.randn(7, 64, device=DEVICE), torch.compile(model, backend=backend)
    return model, lambda: compiled(x), lambda: model(x)


def case(kind: str) -> tuple[nn.Module, Call, Call]:
    """A model, which names the module; the call that compiles; and its result."""
    if kind in ("triton", "deep_gemm"):
        return kernel_of_an_op(Fp8Linear(kind), torch.randn(33, 512, device=DEVICE))
    if kind == "cute":
        return kernel_of_an_op(Router(), torch.randn(5, 2048, device=DEVICE).bfloat16())
    return graph("eager")


def sealed_inductor(action: Any) -> tuple[Call, Call]:
    """A graph that is sealed from Inductor on: Dynamo has to trace it in each new process."""
    from torch._inductor.compile_fx import compile_fx

    def backend(gm: Any, inputs: Any) -> Any:
        with seal(action):
            return compile_fx(gm, inputs)

    def call() -> Tensor:
        try:
            return compiled()
        except Exception as error:  # Dynamo, which is not sealed here, has wrapped it
            inner = getattr(error, "inner_exception", None)
            raise inner or error from None

    _, compiled, right = graph(backend)
    return call, right


def main(kind: str, way: str) -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    heard: list[CompileEvent] = []
    action: Any = heard.append if way == "hear" else "error"
    if kind == "inductor":
        call, right = sealed_inductor(action)
    else:
        _model, compiled, right = case(kind)
        if kind == "dynamo" and way == "load":
            compiled()  # Dynamo keeps nothing from one process to the next

        def call() -> Tensor:
            with seal(action):
                return compiled()

    out = None
    try:
        out = call()
    except SealError as error:
        heard.append(error.event)
    is_right = out is not None and torch.allclose(out, right(), rtol=0.05, atol=0.5)
    events = [asdict(event) for event in heard]
    print(json.dumps({"events": events, "ran": out is not None, "right": is_right}))


if __name__ == "__main__":
    main(*sys.argv[1:])
