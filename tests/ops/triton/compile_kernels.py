"""Compile the Triton kernels for GPUs that are not here, as ``run`` would launch them there.

Run by ``test_compile.py`` in a process of its own, without the interpreter. Prints a JSON line a
kernel: its name, the architecture, the kind of the call, the tensor core instruction, its loads and
stores with the PDL instructions among them, and the bytes of spilled registers.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from compile_ext.ops import triton_support, ue8m0

TYPES = {
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
N, K = 576, 7168
# What a PDL wait stands between.
ORDER = r"griddepcontrol\.\w+|(?:ld|st)\.global"
# The function of a call and its kernel, where they are not run and the module's only kernel.
WAYS = {
    "heads": ("run_bmm", "_batched_kernel"),
    "router and choice": ("run_topk", "_rms_norm_router_kernel"),
    "sum": ("run_add", "_rms_norm_kernel"),
    "groups": ("group_of_each_block", "_group_kernel"),
    "idle": ("zero_idle_rows", "_zero_kernel"),
}


class Launch:
    """Stands for a kernel: takes the arguments of a launch in place of launching."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def take(*args: Any, **kwargs: Any) -> None:
            names = self.kernel.arg_names
            self.options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
            self.arguments = {**dict(zip(names, args, strict=False)), **kwargs}

        return take

    def compile(self, arch: int) -> Any:
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned: dict[tuple[int], Any] = {}
        for i, name in enumerate(self.kernel.arg_names):
            value = self.arguments[name]
            if isinstance(value, Tensor):
                signature[name] = TYPES[value.dtype]
            elif value is None or value == 1 or (name.isupper() and len(name) > 1):
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            # As Triton specialises: a pointer is aligned, a size or stride where it divides.
            if isinstance(value, Tensor) or (signature[name] == "i32" and value % 16 == 0):
                aligned[(i,)] = [["tt.divisibility", 16]]
        of_kernel = GluonASTSource if isinstance(self.kernel, GluonJITFunction) else ASTSource
        source = of_kernel(self.kernel, signature, constants, aligned)
        options = {k: v for k, v in self.options.items() if v is not None}
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def calls() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Kernel, a name for the call, and its arguments."""
    x, w = torch.zeros(4, K, dtype=BF16), torch.ones(K, dtype=BF16)
    yield "rms_norm_quantize_fp8_triton", "norm", (x, w, 1e-6, True)
    yield "rms_norm_triton", "norm", (x, w, 1e-6, True)
    yield "rms_norm_triton", "sum", (x, x, w, 1e-6, True)
    blocks, query = torch.zeros(4, 8, K, dtype=BF16), torch.zeros(K)
    yield "attn_residual_triton", "mixture", (x, blocks, query, 1e-6, w, 1e-6, True)
    b, scale_b = torch.zeros(N, K, dtype=FP8), torch.ones(5, 56)
    x, scale = torch.zeros(256, K, dtype=FP8), torch.ones(56, 256).t()
    experts = torch.zeros(4, N, K, dtype=FP8), scale, torch.ones(4, 5, 56)
    indices = torch.zeros(256, dtype=torch.int32)
    yield "grouped_block_scaled_mm_triton", "experts", (x, *experts, indices, BF16)
    small = x, experts[0], scale.to(ue8m0.E8M0), experts[2].to(ue8m0.E8M0)
    yield "grouped_block_scaled_mm_triton", "experts ue8m0", (*small, indices, BF16)
    yield "group_rows_triton", "groups", (indices, 4, 128)
    yield "group_rows_triton", "idle", (torch.zeros(256, N, dtype=BF16), indices, 4)
    x, scale = torch.zeros(256, 4, K, dtype=FP8), torch.ones(256, 4, 56)
    yield "batched_block_scaled_mm_triton", "heads", (x, experts[0], scale, experts[2], BF16)
    x = torch.zeros(4, K, dtype=BF16)
    yield "router_gemm_triton", "router", (x, b.to(BF16), None)
    yield "router_gemm_triton", "router fp32", (x.float(), b.float(), None)
    yield "router_gemm_triton", "router mixed", (x, b.float(), None)
    for m in (1, 8):
        yield "router_gemm_small_m_triton", f"router m={m}", (x[:1].expand(m, K), b.to(BF16), None)
    yield "router_gemm_small_m_triton", "router m=1 fp32", (x[:1], b.float(), None)
    one = x[:1], None, w, 1e-6, True, b.to(BF16), None
    yield "rms_norm_router_triton", "router behind norm", one
    yield "rms_norm_router_triton", "router behind sum", (one[0], x[1:2], *one[2:])
    choice = torch.zeros(N), 8, "sigmoid", 8, 4, 0.0, True, 2.5
    yield "rms_norm_router_triton", "router and choice", (*one, *choice)
    x, bias = torch.zeros(1, 256), torch.zeros(256)
    yield "router_topk_triton", "choice", (x, None, 8, "softmax", 1, 1, 0.0, True, 1.0)
    yield "router_topk_triton", "choice of groups", (x, bias, 8, "sigmoid", 8, 4, 0.0, True, 2.5)
    # One tile for every M, that of 64 tokens.
    fp8, scale = torch.zeros(4, K, dtype=FP8), torch.ones(56, 4).t()
    yield "block_scaled_mm_triton", "invariant", (fp8, b, scale, scale_b, None, BF16, 64)
    yield "block_scaled_mm_triton", "invariant", (fp8.to(BF16), b, None, scale_b, None, BF16, 64)
    channels = torch.ones(4, 1), torch.ones(N, 1)
    yield "scaled_mm_triton", "invariant", (fp8, b, *channels, None, BF16, 64)
    for m in (1, 16, 128):
        fp8, scale = torch.zeros(m, K, dtype=FP8), torch.ones(56, m).t()
        powers = scale.to(ue8m0.E8M0), scale_b.to(ue8m0.E8M0)
        for kernel in ("block_scaled_mm_small_m", "block_scaled_mm_triton"):
            if m <= 16 or kernel == "block_scaled_mm_triton":
                yield kernel, f"m={m} fp8", (fp8, b, scale, scale_b, None, BF16)
        yield "block_scaled_mm_triton", f"m={m} bf16", (fp8.to(BF16), b, None, scale_b, None, BF16)
        if m <= 16:
            yield "block_scaled_mm_small_m", f"m={m} ue8m0", (fp8, b, *powers, None, BF16)
        yield "block_scaled_mm_triton", f"m={m} fp8 ue8m0", (fp8, b, *powers, None, BF16)
        ue8m0_bf16 = fp8.to(BF16), b, None, powers[1], None, BF16
        yield "block_scaled_mm_triton", f"m={m} bf16 ue8m0", ue8m0_bf16
        yield "scaled_mm_triton", f"m={m}", (fp8, b, torch.ones(m, 1), torch.ones(N, 1), None, BF16)


def spilled_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return max(int(x) for x in re.findall(r"STACK:(\d+)", text))


def main() -> None:
    for arch in (80, 89, 90):
        capability = divmod(arch, 10)
        triton_support._capability = lambda x, found=capability: found
        for name, call, args in calls():
            if name == "block_scaled_mm_small_m" and arch < 89:
                continue  # it wants e4m3 in hardware
            module = importlib.import_module(f"compile_ext.ops.{name}")
            [only, *_] = [x for x in vars(module) if x.endswith("_kernel")]
            function, kernel = WAYS.get(call, ("run", only))
            original = getattr(module, kernel)
            launch = Launch(original)
            setattr(module, kernel, launch)
            try:
                getattr(module, function)(*args)
            finally:
                setattr(module, kernel, original)
            made = launch.compile(arch)
            mma = re.findall(r"(?:mma\.sync|wgmma\.mma_async)[\w.]*", made.asm["ptx"])
            found = {"kernel": name, "arch": arch, "call": call, "mma": sorted(set(mma))}
            order = re.findall(ORDER, made.asm["ptx"])
            spilled = spilled_bytes(made.asm["cubin"])
            print(json.dumps({**found, "order": order, "spilled": spilled}), flush=True)


if __name__ == "__main__":
    main()
