"""The Triton kernels of router_gemm against float64, interpreted or on the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = [(BF16, BF16), (BF16, F32), (F32, BF16), (F32, F32)]
SHAPES = {
    "router_gemm_triton": [((17,), 33, 130), ((2, 3), 5, 300), ((), 1, 1), ((20,), 32, 128)],
    # 9000: more than the steps that are loaded ahead.
    "router_gemm_small_m_triton": [((1,), 3, 9000), ((8,), 1, 64), ((), 5, 1), ((2, 3), 2, 1030)],
}
CASES = [(kernel, *shape) for kernel, shapes in SHAPES.items() for shape in shapes]


def run(a: Tensor, b: Tensor, bias: Tensor | None, kernel: str) -> Tensor:
    result: Tensor = import_module(f"compile_ext.ops.{kernel}").run(a, b, bias)
    return result


@pytest.fixture(params=SHAPES)
def kernel(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def check(a: Tensor, b: Tensor, bias: Tensor | None, kernel: str) -> None:
    got = run(a, b, bias, kernel)
    added: Any = 0.0 if bias is None else bias.double()
    exact = a.double() @ b.double().t() + added
    magnitude = a.double().abs() @ b.double().t().abs() + 1
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    assert got.shape == exact.shape
    # k products (of bfloat16 exact, of float32 rounded) are summed in float32, in any order.
    assert bool(((got - exact).abs() <= (a.shape[-1] + 4) * 2.0**-23 * magnitude).all())


@pytest.mark.parametrize(("kernel", "lead", "n", "k"), CASES, ids=str)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("a_dtype", "b_dtype"), DTYPES, ids=str)
def test_shapes(
    kernel: str,
    lead: tuple[int, ...],
    n: int,
    k: int,
    bias: Any,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    device: str,
) -> None:
    a = torch.randn(*lead, k).to(a_dtype).to(device)
    b = torch.randn(n, k).to(b_dtype).to(device)
    check(a, b, None if bias is None else torch.randn(n).to(bias).to(device), kernel)


@pytest.mark.parametrize(("a_dtype", "b_dtype"), DTYPES[1:], ids=str)
def test_float32_operands_are_not_rounded(
    a_dtype: torch.dtype, b_dtype: torch.dtype, kernel: str, device: str
) -> None:
    a, b = torch.eye(1, 128).to(a_dtype), torch.ones(8, 128).to(b_dtype)
    (a if a_dtype == F32 else b).mul_(1 + 2.0**-20)  # 1 in TF32 and in bfloat16
    assert run(a.to(device), b.to(device), None, kernel).tolist() == [[1 + 2.0**-20] * 8]


def test_any_strides(kernel: str, device: str) -> None:
    a = torch.randn(40, 3).bfloat16().to(device).t()
    b = torch.randn(80, 10).bfloat16().to(device)[::2, ::2].t()
    check(a, b, torch.randn(10).to(device)[::2], kernel)


@pytest.mark.parametrize(("lead", "n", "k"), [((0,), 5, 16), ((3,), 5, 0), ((3,), 0, 16)], ids=str)
def test_empty(lead: tuple[int, ...], n: int, k: int, kernel: str, device: str) -> None:
    a, b = torch.randn(*lead, k).bfloat16().to(device), torch.randn(n, k).bfloat16().to(device)
    bias = torch.randn(n, device=device)
    assert torch.equal(run(a, b, bias, kernel), bias.expand(*lead, n))
