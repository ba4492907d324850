"""Call sites by hand, for tests of what is compiled for them."""

from __future__ import annotations

import torch

from compile_ext.ops.call_site import CallSite, TensorForm, Value
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.define import definition_of
from compile_ext.ops.device import Target

BF16, FP8, F32 = "bfloat16", "float8_e4m3fn", "float32"
H200 = Target((9, 0), "NVIDIA H200", 132)
M = "M"


def dense(dtype: str, *shape: int | str) -> TensorForm:
    """Contiguous; only the first size may depend on M."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride = stride * size if isinstance(size, int) else 0
    return TensorForm(dtype, shape, tuple(reversed(strides)))


def site(
    op: str, m: tuple[int, int | None], n: int | None, k: int | None, **arguments: Value
) -> CallSite:
    named = (*arguments.items(), ("pinned", None))
    return CallSite(f"compile_ext::{op}.default", m, named, n, k)


def router(
    n: int, k: int, bias: str | None = None, m: tuple[int, int | None] = (1, 64)
) -> CallSite:
    return site(
        "router_gemm", m, n, k,
        a=dense(BF16, M, k), b=dense(BF16, n, k), bias=bias and dense(bias, n), prefetch=True,
    )  # fmt: skip


def norm_router(n: int, k: int, bias: str | None = None) -> CallSite:
    return site(
        "rms_norm_router", (1, 1), n, k,
        x=dense(BF16, 1, k), residual=dense(BF16, 1, k), weight=dense(BF16, k), eps=1e-6,
        round_before_weight=True, b=dense(BF16, n, k), bias=bias and dense(bias, n), prefetch=True,
    )  # fmt: skip


def block_scaled(n: int, k: int, m: tuple[int, int | None] = (1, None)) -> CallSite:
    groups = -(-k // 128)
    columns = TensorForm(F32, (M, groups), (1, "4*((M + 3)//4)"))
    return site(
        "block_scaled_mm", m, n, k,
        a=dense(FP8, M, k), b=dense(FP8, n, k), scale_a=columns,
        scale_b=dense(F32, -(-n // 128), groups), bias=None, out_dtype=torch.bfloat16,
        prefetch=True,
    )  # fmt: skip


def units(
    site: CallSite, kernel: str, max_tokens: int, target: Target = H200
) -> tuple[CompileUnit, ...]:
    """Of one kernel of the site's op."""
    definition = definition_of(site.overload)
    assert definition is not None
    found = next(k for k in definition.kernels if k.name == kernel)
    return found.compile_units(site, target, max_tokens)
