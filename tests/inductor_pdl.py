"""Print in which order the kernels that Inductor makes wait, load and store under PDL.

Run by ``test_inductor_pdl.py`` in a process of its own, without a GPU: Inductor is told that the
device has programmatic dependent launch. Prints a JSON line a case: its name, and its calls in
order: of an op its name and whether it prefetches, of a kernel its name, whether it is launched
early, and what it does.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from inductor_kernels import generated_code
from torch import Tensor
from torch._inductor.codegen.triton import TritonKernel

from compile_ext.ops import triton_support

OPS = torch.ops.compile_ext
K = 512
_STEPS = r"gdc_wait|gdc_launch_dependents|tl\.load|tl\.store"
_CALLS = r"(triton_\w+)\.run\(|torch\.ops\.compile_ext\.(\w+)\.default\((.*)\)"


def layers(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Pointwise code before, between and behind norms, which read what is two kernels back."""
    h = x + residual
    y = OPS.rms_norm(h, w, 1e-6, True)
    z = OPS.rms_norm(F.silu(y) * h, w, 1e-6, True)
    return z * h, (z + y).relu().sum(-1)


def fill(x: Tensor) -> tuple[Tensor, ...]:
    """A kernel that only stores, behind two that depend on each other."""
    h = x.sum(0)
    return h, torch.full((1000,), 3.0), h.softmax(0).sum() + (h[:, None] * h[None, :]).sum(0)


def steps_of(code: str) -> list[list[Any]]:
    kernels: dict[str, list[Any]] = {}
    for name, body in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S):
        source = body[body.index("def triton_") :]
        kernels[name] = ["'launch_pdl': True" in body, re.findall(_STEPS, source)]
    calls = re.findall(_CALLS, code[code.index("def call(") :])
    return [
        [name, *kernels[name]] if name else [op, "prefetch=False" not in arguments]
        for name, op, arguments in calls
    ]


def main() -> None:
    triton_support.has_pdl = lambda x: True
    TritonKernel._enable_pdl_codegen = staticmethod(lambda: inductor_config.triton.enable_pdl)
    x, w = torch.randn(8, K).bfloat16(), torch.randn(K).bfloat16()
    early = {"triton.enable_pdl": True}
    cases = {
        "layers": generated_code(layers, x, x, w, **early),
        "layers without": generated_code(layers, x, x, w),
        "fill": generated_code(fill, torch.randn(800, K), **early),
    }
    with inductor_config.patch(early):
        cases["layers never"] = generated_code(layers, x, x, w, **{"compile_ext.pdl": False})
    for name, code in cases.items():
        print(json.dumps([name, steps_of(code)]))


if __name__ == "__main__":
    main()
