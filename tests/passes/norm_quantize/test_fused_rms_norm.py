"""Where a device has a kernel for the whole RMSNorm, as CUDA has, ``F.rms_norm`` is one ATen op:
the pass sees through it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions
from torch.library import Library

from compile_ext.ops import quantize_fp8_groups

K = 256
OP = torch.ops.aten._fused_rms_norm.default

pytestmark = pytest.mark.usefixtures("norm_kernel")


@pytest.fixture(autouse=True)
def kernel_of_its_own() -> Iterator[None]:
    """As if the CPU had one: then the dispatcher does not take the op apart."""
    library = Library("aten", "IMPL")
    library.impl("_fused_rms_norm", get_decompositions([OP])[OP], "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_is_seen_through(rewrite: Any, with_weight: bool, dtype: torch.dtype) -> None:
    def model(x: Tensor, w: Tensor) -> Any:
        return quantize_fp8_groups(F.rms_norm(x, (K,), w if with_weight else None, 1e-6))

    x, w = torch.randn(5, K).to(dtype), torch.rand(K).to(dtype) + 0.5
    with torch.profiler.profile() as profiled:
        model(x, w)
    assert "aten::_fused_rms_norm" in [e.name for e in profiled.events() or []]
    got = rewrite(model, x, w)
    assert [fired for fired, _ in got.of("fuse_norm_quantize")] == [True]
    assert "compile_ext::rms_norm_quantize_fp8(" in got.graph
