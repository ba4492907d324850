"""The Triton kernel of router_topk against its reference, interpreted or on the GPU."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops.router_topk import router_topk_ref

INF = math.inf


def check(x: Tensor, bias: Tensor | None, *arguments: Any) -> None:
    weights, ids = import_module("compile_ext.ops.router_topk_triton").run(x, bias, *arguments)
    want, want_ids = router_topk_ref(x, bias, *arguments)
    assert (ids.dtype, ids.shape, ids.is_contiguous()) == (torch.int64, want_ids.shape, True)
    assert torch.equal(ids, want_ids)
    assert weights.is_contiguous()
    # exp2 of a GPU is good to 2^-22, of an argument that is off by 2^-24 of up to 2^4.
    torch.testing.assert_close(weights, want, rtol=1e-6, atol=0, equal_nan=True)


def steps(*shape: int) -> Tensor:
    """Multiples of a quarter: many are equal, and what is not differs by more than rounding. None
    is negative: sigmoids of x and -x add up to 1, which is a tie that rounding decides."""
    return torch.randint(0, 20, shape).float() / 4


# The interpreter takes 20 ms a row and expert that is chosen.
@pytest.mark.parametrize(
    ("n", "top_k"), [(1, 1), (2, 2), (7, 3), (128, 8), (129, 4), (256, 8), (896, 5), (2048, 32)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_width(n: int, top_k: int, has_bias: bool, device: str) -> None:
    x = steps(1 if top_k > 8 else 3, n).to(device)
    bias = (torch.randint(0, 4, (n,)) / 8).to(device) if has_bias else None
    for scores, renormalize in (("softmax", True), ("sigmoid", False)):
        check(x, bias, top_k, scores, 1, 1, -INF, renormalize, 1.5)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_every_kind_of_weight(scores: str, has_bias: bool, renormalize: bool, device: str) -> None:
    bias = (torch.randint(0, 4, (60,)) / 8).to(device) if has_bias else None
    check(steps(3, 60).to(device), bias, 3, scores, 1, 1, -INF, renormalize, 1.5)


@pytest.mark.parametrize(
    ("n", "groups", "top_groups", "top_k"),
    [(256, 8, 4, 8), (160, 8, 3, 6), (60, 5, 2, 4), (6, 3, 1, 6), (8, 4, 4, 3)],
)
@pytest.mark.parametrize("masked", [-INF, 0.0])
@pytest.mark.parametrize("has_bias", [False, True])
def test_groups(
    n: int, groups: int, top_groups: int, top_k: int, masked: float, has_bias: bool, device: str
) -> None:
    """Biases so small that what is masked with 0 is larger than some of the scores; and a top_k of
    more than the groups have."""
    x = steps(4, n).to(device)
    bias = (-torch.randint(0, 12, (n,)) / 8).to(device) if has_bias else None
    scores = "sigmoid" if has_bias else "softmax"
    check(x, bias, top_k, scores, groups, top_groups, masked, True, 2.5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of inf - inf
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_what_is_not_finite(groups: int, scores: str, device: str) -> None:
    x = steps(12, 16)
    values = torch.tensor([math.nan, -math.nan, INF, -INF, 0.0, -0.0, 1e30, -1e30])
    x = torch.where(torch.rand(x.shape) < 0.3, values[torch.randint(0, 8, x.shape)], x)
    x[0], x[1], x[2] = math.nan, -INF, INF
    check(x.to(device), None, 9, scores, groups, min(groups, 2), -INF, False, 1.0)


def test_negative_zero_is_zero(device: str) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0, -0.0]], device=device)
    check(x, None, 4, "softmax", 1, 1, -INF, True, 1.0)


def test_weights_that_vanish(device: str) -> None:
    check(torch.full((1, 8), -200.0, device=device), None, 2, "sigmoid", 1, 1, -INF, True, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_the_bias(dtype: torch.dtype, device: str) -> None:
    bias = (torch.randint(0, 4, (24,)) / 8).to(dtype).to(device)
    check(steps(2, 24).to(device), bias, 2, "sigmoid", 4, 2, -INF, True, 1.0)


def test_leading_dimensions_and_strides(device: str) -> None:
    x = steps(2 * 24, 3, 2).to(device).permute(1, 2, 0)[..., ::2]
    bias = torch.zeros(48, device=device)[::2]
    check(x, bias, 3, "softmax", 1, 1, -INF, True, 1.0)
    check(x[0, 0], bias, 3, "softmax", 1, 1, -INF, True, 1.0)


def test_no_tokens(device: str) -> None:
    check(torch.zeros(0, 24, device=device), None, 5, "softmax", 1, 1, -INF, True, 1.0)
