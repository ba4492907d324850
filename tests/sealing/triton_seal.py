"""What a seal hears of Triton's compiler, which compiles for a GPU that is not here. Run by
``test_triton.py`` in a process of its own, without the interpreter and with an empty cache. Prints
a JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from compile_ext import CompileEvent, SealError, seal
from compile_ext.ops import rms_norm, triton_support
from compile_ext.ops.define import definition_of

TARGET = GPUTarget("cuda", 90, 32)
MODEL = nn.ModuleDict({"norm": nn.RMSNorm(100)}).requires_grad_(False)


@triton.jit
def add_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


@gluon.jit
def gluon_kernel(x_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout=layout)
    gl.store(x_ptr + i, i)


@triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=[])
@triton.jit
def tuned_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)


def shown(event: CompileEvent) -> dict[str, Any]:
    fields = ("kind", "kernel", "shapes", "op", "modules", "reason", "fix")
    return {**{x: getattr(event, x) for x in fields}, "key": len(event.key)}


def refused(call: Any) -> dict[str, Any] | None:
    """What a seal refuses of a call, None where it lets it through."""
    try:
        with seal("error"):
            call()
    except SealError as error:
        return shown(error.event)
    return None


def compiled() -> int:
    """Kernels in the cache."""
    return len(list(Path(knobs.cache.dir).glob("*/*.cubin")))


def three_times(call: Any) -> list[Any]:
    """Refused; let through and compiled; then sealed again, with the kernel there."""
    before = compiled()
    first = refused(call)
    between = compiled() - before
    call()
    return [first, between, compiled() - before, refused(call)]


def ahead() -> None:
    types = {"x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    triton.compile(ASTSource(add_kernel, types, {"BLOCK": 32}), target=TARGET)


def ahead_in_gluon() -> None:
    triton.compile(GluonASTSource(gluon_kernel, {"x_ptr": "*i32"}, {}), target=TARGET)


def launch(x: Tensor, *_: Any, prefetch: bool = False) -> Tensor:
    """As a kernel of an op, but for the launch."""
    add_kernel.run(x, x.shape[1], BLOCK=256, grid=(1,), warmup=True)
    return x.clone()


def call_op() -> None:
    norm: Any = MODEL["norm"]
    rms_norm(torch.zeros(7, 100), norm.weight, 1e-6)


def tune() -> None:
    tuned_kernel.cache.clear()
    tuned_kernel.run(torch.zeros(128), grid=(1,), warmup=True)


def hooks() -> list[Any]:
    """Others' hooks are called under a seal, and are there after it."""
    said: list[str] = []

    def ask(**kwargs: Any) -> None:
        said.append("asked")

    def listen(*, cache_hit: bool, **kwargs: Any) -> None:
        said.append("hit" if cache_hit else "compiled")

    knobs.runtime.jit_cache_hook, knobs.compilation.listener = ask, listen
    with seal(lambda event: said.append(event.kind)):
        add_kernel.run(torch.zeros(8), 8, BLOCK=8, grid=(1,), warmup=True)
        hooks = [knobs.runtime.jit_cache_hook is ask, knobs.compilation.listener is listen]
    knobs.runtime.jit_cache_hook = knobs.compilation.listener = None
    return [said, hooks]


def main() -> None:
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: TARGET,
        )
    )
    module: Any = ModuleType("compile_ext.ops.launch_triton")
    module.run = launch
    sys.modules[module.__name__] = module
    definition = definition_of(torch.ops.compile_ext.rms_norm.default)
    assert definition is not None
    kernel = definition.kernels[0]
    kernel.why_not = lambda *args: None
    kernel.run = triton_support.run_of("launch_triton")
    tuned_kernel.do_bench = lambda call, quantiles: [call() and 1.0] * 3
    make_ir = ASTSource.make_ir
    found = {
        "ahead": three_times(ahead),
        "gluon": three_times(ahead_in_gluon),
        "op": three_times(call_op),
        "given_up": kernel.failures,
        "tuned": three_times(tune),
        "hooks": hooks(),
        "taken_out": ASTSource.make_ir is make_ir,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
