"""Print the kernels that Inductor makes for a GPU of a block of a model, without a GPU.

Run by ``test_fused_quantization.py`` in a process of its own. Inductor generates Triton for the CPU
as for a GPU (``cpu_backend``), and says which kernels the graph calls; they are never compiled. The
ops are taken for ops that have a kernel. ``inductor_pdl.py`` generates code in the same way.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config
from test_gpu_fused_quantization import Block, K
from torch import Tensor
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from compile_ext.ops import define
from compile_ext.ops.add_rms_norm_quantize_fp8 import OP as ADD_RMS_NORM_QUANTIZE
from compile_ext.ops.block_scaled_mm import OP as BLOCK_SCALED_MM
from compile_ext.ops.rms_norm_quantize_fp8 import OP as RMS_NORM_QUANTIZE


class Driver:
    """What Inductor asks of Triton's driver while it generates code."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class Generated(Exception):
    """Code was generated; nothing runs it."""


def calls_of(code: str) -> list[str]:
    """The kernels and ops that generated code calls, in order."""
    return re.findall(r"(triton_\w+)\.run\(|torch\.ops\.(compile_ext\.\w+)\.default\(", code)


def generated_code(model: Callable[..., Any], *args: Tensor, **options: Any) -> str:
    """The code that Inductor generates for a call of a model, which is not run."""
    inductor_config.cpu_backend = "triton"
    inductor_config.force_disable_caches = True
    inductor_config.compile_threads = 1
    driver.set_active(Driver())
    codes: list[str] = []

    def generate_only(self: GraphLowering) -> Any:
        codes.append(self.codegen()[0].value)
        raise Generated

    GraphLowering.compile_to_module = generate_only  # type: ignore[method-assign]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="compile_ext", options=options)
    try:
        with torch.no_grad():
            compiled(*args)
    except InductorError:  # in which torch wraps Generated
        if not codes:
            raise
    return codes[0]


def main() -> None:
    for op in (RMS_NORM_QUANTIZE, ADD_RMS_NORM_QUANTIZE, BLOCK_SCALED_MM):
        old = define._DEFINITIONS[op]
        [reference] = [k for k in old.kernels if k.name == "reference"]
        kernels = define.Kernel("test", define.never, reference.run), reference
        define._DEFINITIONS[op] = define.OpDefinition(op, kernels)
    m, arguments = sys.argv[1], int(sys.argv[2])
    args = [torch.randn(8 if m == "dynamic" else int(m), K).bfloat16() for _ in range(arguments)]
    for x in args if m == "dynamic" else ():
        torch._dynamo.mark_dynamic(x, 0)
    print(json.dumps([a or b for a, b in calls_of(generated_code(Block(), *args))]))


if __name__ == "__main__":
    main()
