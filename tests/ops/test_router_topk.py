"""router_topk against the models that it stands for, its order of equal values, and refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import router_topk
from compile_ext.ops.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GradError,
    RankError,
    ShapeError,
)

OVERLOAD = torch.ops.compile_ext.router_topk.default
NAN, INF = math.nan, math.inf
N, TOP_K = 24, 4


def softmax_top_k(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen3-MoE with norm_topk_prob, and Mixtral."""
    weights, ids = torch.topk(torch.softmax(x, -1), TOP_K)
    return weights / weights.sum(-1, keepdim=True), ids


def plain_softmax_top_k(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Qwen2-MoE: the weights do not add up to 1."""
    weights, ids = torch.topk(torch.softmax(x, -1), TOP_K)
    return weights, ids


def softmax_of_the_chosen(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gpt-oss."""
    values, ids = torch.topk(x, TOP_K)
    return torch.softmax(values, -1), ids


def grouped_sigmoid(masked: float) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def choose(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """DeepSeek-V3, with 4 groups of 6 of which 2 take part."""
        scores = x.sigmoid()
        biased = (scores + bias).view(-1, 4, 6)
        best = torch.topk(biased.topk(2, dim=-1)[0].sum(-1), 2)[1]
        mask = torch.zeros(x.shape[0], 4).scatter(1, best, 1.0).bool()
        biased = biased.masked_fill(~mask.unsqueeze(-1), masked).view(-1, N)
        ids = biased.topk(TOP_K)[1]
        weights = scores.gather(1, ids)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids

    return choose


GROUPED = {"scores": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5}
MODELS: dict[str, tuple[Any, dict[str, Any], bool]] = {  # what it does; our arguments; with a bias
    "qwen3": (softmax_top_k, {}, False),
    "qwen2": (plain_softmax_top_k, {"renormalize": False}, False),
    "gpt_oss": (softmax_of_the_chosen, {}, False),
    "deepseek_v3": (grouped_sigmoid(-INF), GROUPED, True),
    "deepseek_v3_of_transformers_4": (grouped_sigmoid(0.0), {**GROUPED, "masked": 0.0}, True),
}


@pytest.mark.parametrize("model", MODELS)
def test_equals_the_model(model: str) -> None:
    spelled, arguments, has_bias = MODELS[model]
    x, bias = torch.randn(50, N) * 3, torch.randn(N) / 5
    weights, ids = router_topk(x, bias if has_bias else None, top_k=TOP_K, **arguments)
    want, want_ids = spelled(x, bias)
    assert torch.equal(ids, want_ids)  # no two values of random rows are equal
    # One rounding more or less of exp, a sum and a quotient, each 2^-24 relative.
    torch.testing.assert_close(weights, want, rtol=5e-7, atol=0)


def choose(row: list[float], top_k: int, bias: list[float] | None = None, **more: Any) -> list[int]:
    added = None if bias is None else torch.tensor(bias)
    weights, ids = router_topk(torch.tensor([row]), added, top_k=top_k, **more)
    assert weights.shape == ids.shape == (1, top_k)
    return ids[0].tolist()


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [None, [0.0] * 6])
def test_of_equal_values_the_first_is_chosen(scores: str, bias: Any) -> None:
    assert choose([1.0, 2.0, 1.0, 2.0, 1.0, 2.0], 5, bias, scores=scores) == [1, 3, 5, 0, 2]
    zeros = None if bias is None else bias[:4]
    assert choose([0.0, -0.0, 0.0, -0.0], 4, zeros, scores=scores) == [0, 1, 2, 3]


@pytest.mark.parametrize("has_bias", [False, True])
def test_many_equal_values(has_bias: bool) -> None:
    x = torch.randint(0, 4, (3, 2048)).float()  # more than an unstable sort keeps in order by luck
    _, ids = router_topk(x, torch.zeros(2048) if has_bias else None, top_k=2000)
    for row, chosen in zip(x.tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(2048), key=lambda i, row=row: -row[i])[:2000]


def test_of_equal_groups_the_first_is_chosen() -> None:
    row = [0.0, 0.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0]  # the last three groups have one sum
    grouped = {"scores": "sigmoid", "groups": 4, "top_groups": 2}
    assert choose(row, 4, **grouped) == [3, 4, 2, 5]


def test_logits_decide_where_scores_are_rounded_to_one() -> None:
    for scores in ("softmax", "sigmoid"):  # 30 and 40 are 1.0 for a sigmoid; -200 is 0 for both
        assert choose([-200.0, 30.0, -190.0, 40.0], 4, scores=scores) == [3, 1, 2, 0]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    x = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    weights, ids = router_topk(
        x, torch.tensor([0, 0, 9.0, 0]), top_k=2, scores="sigmoid", renormalize=False, scale=2.0
    )
    assert ids.tolist() == [[2, 3]]
    assert torch.equal(weights, 2 * x.sigmoid()[:, [2, 3]])


def test_a_group_counts_by_its_best_two() -> None:
    grouped = {"scores": "sigmoid", "groups": 3, "top_groups": 1}
    # The largest of all is in a group whose second is small; the sum of all is largest in the last.
    row = [3.0, -9.0, -9.0, 2.0, 2.0, -9.0, 1.0, 1.0, 1.0]
    assert choose(row, 2, **grouped) == [3, 4]


@pytest.mark.parametrize(("masked", "want"), [(-INF, [1, 0, 2, 3]), (0.0, [1, 2, 3, 0])])
def test_what_an_expert_outside_of_the_groups_counts(masked: float, want: list[int]) -> None:
    """Where the biased scores of the best group are below it, and where more are wanted than the
    group has."""
    grouped = {"scores": "sigmoid", "groups": 2, "top_groups": 1, "masked": masked}
    assert choose([0.0, 2.0, -5.0, -6.0], 4, [-0.6, 0.0, -5.0, -5.0], **grouped) == want


def test_nan_is_the_largest_and_no_id_is_out_of_range() -> None:
    assert choose([0.0, NAN, 5.0, -NAN], 3) == [1, 3, 2]
    assert choose([NAN] * 4, 3) == [0, 1, 2]
    assert choose([-INF] * 4, 3) == [0, 1, 2]
    assert choose([-INF, INF, 0.0, INF], 3) == [1, 3, 2]
    grouped = {"scores": "sigmoid", "groups": 2, "top_groups": 1}
    assert choose([9.0, 9.0, -9.0, NAN], 2, **grouped) == [3, 2]


def test_nan_in_the_weights() -> None:
    x = torch.tensor([[0.0, NAN, 5.0]])
    assert router_topk(x, top_k=2)[0].isnan().all()  # a softmax of a NaN is NaN
    weights, _ = router_topk(x, top_k=2, scores="sigmoid", renormalize=False)
    assert weights.isnan().tolist() == [[True, False]]


def test_weights_that_vanish_are_no_division_by_zero() -> None:
    weights, _ = router_topk(torch.full((1, 4), -200.0), top_k=2, scores="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("lead", [(), (0,), (1,), (5,), (2, 0), (2, 3)], ids=str)
def test_opcheck(lead: tuple[int, ...], opcheck: Any) -> None:
    bias = torch.randn(12)
    for x in (torch.randn(*lead, 12), torch.randn(12, *lead).movedim(0, -1)):
        for groups, added in ((1, None), (1, bias), (3, bias.bfloat16())):
            opcheck(OVERLOAD, (x, added, 5, "sigmoid", groups, groups, 0.0, True, 1.5))


def test_leading_dimensions_and_strides() -> None:
    x = torch.randn(12, 3, 2)
    weights, ids = router_topk(x.permute(2, 1, 0), top_k=3)
    for i, j in itertools.product(range(2), range(3)):
        want = router_topk(x[:, j, i], top_k=3)
        assert torch.equal(ids[i, j], want[1])
        torch.testing.assert_close(weights[i, j], want[0], rtol=2.0**-22, atol=0)
    assert weights.is_contiguous()
    assert ids.is_contiguous()
    for result in router_topk(x[:, :1, 0].t(), top_k=3):  # one row
        assert result.stride() == (3, 1)


def valid() -> dict[str, Any]:
    return {
        "logits": torch.zeros(2, 12),
        "bias": torch.zeros(12),
        "top_k": 3,
        "scores": "softmax",
        "groups": 4,
        "top_groups": 2,
        "masked": 0.0,
        "renormalize": True,
        "scale": 1.0,
    }


def call(*values: Any) -> tuple[Tensor, Tensor]:
    logits, bias, top_k, scores, groups, top_groups, masked, renormalize, scale = values
    return router_topk(
        logits, bias, top_k=top_k, scores=scores, groups=groups, top_groups=top_groups,
        masked=masked, renormalize=renormalize, scale=scale,
    )  # fmt: skip


call.__name__ = "router_topk"
BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "bf16": ("logits", torch.zeros(2, 12).bfloat16(), DtypeError, "logits of bfloat16", "float32"),
    "scalar": (
        "logits", torch.tensor(0.0), RankError, "logits of shape []", "at least 1 dimension",
        "as [..., n]"),
    "bias_int": ("bias", torch.zeros(12).int(), DtypeError, "bias of int32", "bfloat16 or float16"),
    "bias_of_m": ("bias", torch.zeros(2), ShapeError, "bias of shape [2]", "[12]"),
    "bias_meta": (
        "bias", torch.zeros(12, device="meta"), DeviceError, "bias on meta", "one device"),
    "bias_grad": (
        "bias", torch.zeros(12).requires_grad_(), GradError, "bias that", "gradient"),
    "scores": (
        "scores", "tanh", ArgumentError, "scores = 'tanh'", "softmax or sigmoid", "name one"),
    "none": ("top_k", 0, ArgumentError, "top_k = 0, n = 12", "1 to n", "choose 1 to n experts"),
    "too_many": ("top_k", 13, ArgumentError, "top_k = 13, n = 12", "1 to n", "choose 1 to n"),
    "no_groups": (
        "groups", 0, ArgumentError, "top_groups = 2, groups = 0", "1 to groups", "pass 1 and 1"),
    "no_top_groups": (
        "top_groups", 0, ArgumentError, "top_groups = 0, groups = 4", "1 to groups", "pass 1"),
    "more_than_all": (
        "top_groups", 5, ArgumentError, "top_groups = 5, groups = 4", "1 to groups", "pass 1"),
    "uneven": ("groups", 5, ArgumentError, "groups = 5, n = 12", "of one size", "pass 1 and 1"),
    "groups_of_1": (
        "groups", 12, ArgumentError, "groups = 12, n = 12", "2 experts or more", "pass 1 and 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str, assert_refused: Any) -> None:
    assert_refused(call, valid(), BAD[case])


def test_the_valid_call_of_the_refusals_is_valid() -> None:
    weights, ids = call(*valid().values())
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))
