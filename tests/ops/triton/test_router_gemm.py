"""The Triton kernel of router_gemm against float64, interpreted or on the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

SHAPES = [((1,), 8, 64), ((17,), 33, 130), ((2, 3), 5, 300), ((), 1, 1), ((20,), 32, 128)]


def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = import_module("compile_ext.ops.router_gemm_triton").run(a, b, bias)
    return result


def check(a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    got = run(a, b, bias)
    added: Any = 0.0 if bias is None else bias.double()
    exact = a.double() @ b.double().t() + added
    magnitude = a.double().abs() @ b.double().t().abs() + 1
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    assert got.shape == exact.shape
    # Products of bfloat16 are exact in float32, and k of them are summed there, in any order.
    assert bool(((got - exact).abs() <= (a.shape[-1] + 4) * 2.0**-23 * magnitude).all())


@pytest.mark.parametrize(("lead", "n", "k"), SHAPES, ids=str)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32], ids=str)
def test_shapes(lead: tuple[int, ...], n: int, k: int, bias: Any, device: str) -> None:
    a = torch.randn(*lead, k).bfloat16().to(device)
    b = torch.randn(n, k).bfloat16().to(device)
    check(a, b, None if bias is None else torch.randn(n).to(bias).to(device))


def test_any_strides(device: str) -> None:
    a = torch.randn(40, 7).bfloat16().to(device).t()
    b = torch.randn(80, 18).bfloat16().to(device)[::2, ::2].t()
    check(a, b, torch.randn(18).to(device)[::2])


@pytest.mark.parametrize(("lead", "n", "k"), [((0,), 5, 16), ((3,), 5, 0), ((3,), 0, 16)], ids=str)
def test_empty(lead: tuple[int, ...], n: int, k: int, device: str) -> None:
    a, b = torch.randn(*lead, k).bfloat16().to(device), torch.randn(n, k).bfloat16().to(device)
    bias = torch.randn(n, device=device)
    assert torch.equal(run(a, b, bias), bias.expand(*lead, n))
