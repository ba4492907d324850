"""attn_residual: the model code that it stands for bit by bit, float64, edges, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import attn_residual, rms_norm
from compile_ext.ops.errors import DeviceError, DtypeError, GradError, RankError, ShapeError

OP = torch.ops.compile_ext.attn_residual.default
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6
SHAPES = [(1, 8, 256), (5, 3, 129), (3, 1, 64), (2, 0, 32), (0, 4, 32), (4, 2, 1)]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def data(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    m, length, k = shape
    # Blocks of different sizes; scores of a few units, so that no weight is 0 or 1.
    sizes = torch.logspace(-1, 1, length + 1)[:, None]
    stack = (torch.randn(m, length + 1, k) * sizes).to(dtype)
    return stack[:, length].contiguous(), stack[:, :length], torch.randn(k) * 2 / k**0.5


def model(x: Tensor, blocks: Tensor, norm_weight: Tensor, query: Tensor, eps: float) -> Tensor:
    """Kimi K3's spelling, of the mixture."""
    v = torch.cat((blocks, x[:, None]), dim=1).float()
    k = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    scores = (k * (norm_weight.float() * query.float())).sum(-1)
    return torch.matmul(scores.softmax(-1).unsqueeze(1), v).squeeze(1).to(x.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("round_before_weight", [False, True])
@each_dtype
def test_equals_the_model_and_the_norm_bit_by_bit(shape, round_before_weight, dtype):
    x, blocks, query = data(shape, dtype)
    key_weight, weight = torch.randn(shape[2]).to(dtype), torch.randn(shape[2]).to(dtype)
    scaled = key_weight.float() * query
    y, mixed = attn_residual(x, blocks, scaled, 1e-5, weight, EPS, round_before_weight)
    assert torch.equal(mixed, model(x, blocks, key_weight, query, 1e-5))
    assert torch.equal(y, rms_norm(mixed, weight, EPS, round_before_weight))
    assert y.is_contiguous()
    assert mixed.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_dtype
def test_stays_near_float64(shape, dtype):
    x, blocks, query = data(shape, dtype)
    v = torch.cat((blocks, x[:, None]), 1).double()
    keys = v * (v.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    weights = (keys * query.double()).sum(-1).softmax(-1)
    exact, magnitude = (torch.einsum("ml,mlk->mk", weights, t) for t in (v, v.abs()))
    _, mixed = attn_residual(x, blocks, query, EPS)
    # Scores in float32 are off by a few 2^-24 of the sum of their products, below 32 here: so are
    # their exponentials, relatively. Then one rounding to x's dtype.
    bound = 2.0**-18 * magnitude + torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((mixed.double() - exact).abs() <= bound + torch.finfo(dtype).tiny).all()


def test_without_blocks_x_stays():
    x = torch.randn(3, 64).bfloat16()
    y, mixed = attn_residual(x, x.new_empty(3, 0, 64), torch.randn(64))
    assert torch.equal(mixed, x)
    assert torch.equal(y, rms_norm(x))


def test_a_block_that_scores_high_takes_it_all():
    x, query = torch.ones(1, 4), torch.tensor([1000.0, 0, 0, 0])
    blocks = torch.tensor([[[2.0, 0, 0, 0], [0, 3, 0, 0]]])
    _, mixed = attn_residual(x, blocks, query)
    # Keys [2, 0, 0, 0], [0, 2, 0, 0] and [1, 1, 1, 1]: scores of 2000, 0 and 1000.
    assert mixed.tolist() == [[2, 0, 0, 0]]


@each_dtype
def test_opcheck(dtype, opcheck):
    for shape in SHAPES:
        x, blocks, query = data(shape, dtype)
        if not blocks.numel():  # opcheck takes no empty views
            x, blocks = (torch.randn(t.shape).to(dtype) for t in (x, blocks))
        stacked = torch.randn(shape[1], *x.shape).to(dtype).transpose(0, 1)
        opcheck(OP, (x, blocks, query, EPS, None, EPS, True))
        opcheck(OP, (x, stacked, query, EPS, query.to(dtype), EPS, False, True))


def valid() -> dict[str, Any]:
    x, blocks = torch.ones(2, 32).bfloat16(), torch.ones(2, 3, 32).bfloat16()
    common = {"weight": torch.ones(32), "eps": EPS, "round_before_weight": True}
    return {"x": x, "blocks": blocks, "query": torch.ones(32), "key_eps": EPS, **common}


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "x_int": ("x", torch.ones(2, 32).int(), DtypeError, "x of int32", "bfloat16 or float16"),
    "x_rank_3": ("x", torch.ones(1, 2, 32), RankError, "[1, 2, 32]", "2 dimensions"),
    "b_float": (
        "blocks", torch.ones(2, 3, 32), DtypeError, "blocks of float32", "bfloat16"),
    "b_rank_2": (
        "blocks", torch.ones(2, 32).bfloat16(), RankError, "blocks of shape [2, 32]",
        "3 dimensions", "pass blocks as [m, l, k]"),
    "b_stacked": (
        "blocks", torch.ones(3, 2, 32).bfloat16(), ShapeError, "blocks of shape [3, 2, 32]",
        "[2, 2, 32]"),
    "b_meta": (
        "blocks", torch.ones(2, 3, 32, device="meta").bfloat16(), DeviceError, "blocks on meta",
        "one device"),
    "b_grad": (
        "blocks", torch.ones(2, 3, 32).bfloat16().requires_grad_(), GradError, "blocks that",
        "gradient"),
    "q_of_1_k": (
        "query", torch.ones(1, 32), ShapeError, "query of shape [1, 32]", "[32]"),
    "q_int": ("query", torch.ones(32).int(), DtypeError, "query of int32", "or float32"),
    "w_of_m": ("weight", torch.ones(2), ShapeError, "weight of shape [2]", "[32]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, assert_refused):
    assert_refused(attn_residual, valid(), BAD[case])


def test_the_valid_call_of_the_refusals_is_valid():
    y, mixed = attn_residual(**valid())
    assert mixed.tolist() == y.tolist() == [[1.0] * 32] * 2
