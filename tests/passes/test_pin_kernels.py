"""pin_kernels: the option names the kernel of an op's calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

import compile_ext
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import scaled_mm
from compile_ext.ops.errors import KernelError

PASS = "pin_kernels"
PINNED = {"compile_ext.kernels": {"scaled_mm": "reference", "router_gemm": "aten"}}


class Linear(nn.Module):
    def __init__(self, n: int = 16) -> None:
        super().__init__()
        layer = ChannelFp8Linear(torch.randn(n, 64))
        self.weight, self.scale = layer.weight, layer.weight_scale

    def forward(self, a: Tensor, scale: Tensor) -> Tensor:
        return scaled_mm(a, self.weight, scale, self.scale, out_dtype=torch.float32)


def operands(m: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(m, 64).to(torch.float8_e4m3fn), torch.rand(m, 1)


def test_names_the_kernel(rewrite: Any) -> None:
    got = rewrite(Linear(), *operands(), options=PINNED)
    assert got.of(PASS) == [(True, "kernel reference")]
    assert_expected_inline(
        got.graph,
        """\
arg0: float8_e4m3fn[16, 64]
arg1: float32[16, 1]
arg2: float8_e4m3fn[5, 64]
arg3: float32[5, 1]
%0: float32[5, 16] = compile_ext::scaled_mm(arg2, arg0, arg3, arg1, None, float32, reference)
return [%0]""",
    )


def test_behind_a_padding(rewrite: Any) -> None:
    # Sums of 64 products in another order, for other extents: some of them in the last bit.
    got = rewrite(Linear(10), *operands(), options=PINNED, tolerance=64 * 2.0**-20)
    assert got.of(PASS) == [(True, "kernel reference")]


@pytest.mark.parametrize("name", ["block_scaled_mm", "block_scaled_mm_m1"])
def test_holds_for_the_variant_of_one_token(rewrite: Any, name: str) -> None:
    options = {"compile_ext.kernels": {name: "reference"}}
    got = rewrite(
        BlockFp8Linear(torch.randn(16, 64)), torch.randn(1, 64).bfloat16(), options=options
    )
    assert got.of(PASS) == [(True, "kernel reference")]
    assert "block_scaled_mm_m1(" in got.graph


@pytest.mark.parametrize("options", [{}, {"compile_ext.kernels": {"block_scaled_mm": "triton"}}])
def test_leaves_other_ops_alone(rewrite: Any, options: Any) -> None:
    got = rewrite(Linear(), *operands(), options=options)
    assert got.of(PASS) == []
    assert "reference" not in got.graph


def test_a_call_that_names_one_itself(rewrite: Any) -> None:
    class Named(Linear):
        def forward(self, a: Tensor, scale: Tensor) -> Tensor:
            op = torch.ops.compile_ext.scaled_mm
            args = a, self.weight, scale, self.scale, None, torch.float32
            result: Tensor = op(*args, pinned="reference")
            return result

    options = {"compile_ext.kernels": {"scaled_mm": "triton"}}
    got = rewrite(Named(), *operands(), options=options)
    assert got.of(PASS) == [(False, "the call names reference")]


@torch.no_grad()
def test_a_kernel_that_cannot_run_is_an_error() -> None:
    options: Any = {"compile_ext.inner": "eager", "compile_ext.kernels": {"scaled_mm": "aten"}}
    compiled = torch.compile(Linear(), backend="compile_ext", options=options)
    with pytest.raises(TorchDynamoException, match="runs on CUDA, the tensors are on cpu") as error:
        compiled(*operands())
    assert KernelError.__name__ in str(error.value)


@torch.no_grad()
def test_explain_says_what_runs() -> None:
    model = Linear()
    options: Any = {"compile_ext.inner": "eager", **PINNED}
    compiled = torch.compile(model, backend="compile_ext", options=options)
    compiled(*operands())
    [row] = compile_ext.explain(compiled).rows
    assert row.site is not None
    assert (row.site.kernel, row.site.passed_over) == ("reference", ())
