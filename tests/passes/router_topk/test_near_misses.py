"""What is nearly a choice that router_topk knows, and the reason why it is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from choice_model import GROUPS, PASS, TOP_K, Model, N, dense, softmax, tokens
from torch import Tensor

UNKNOWN = "a step between the logits and the weights of the experts is not known"


def groups_by_their_largest(x: Tensor, b: Tensor) -> Any:
    """DeepSeek-V2."""
    scores = x.softmax(-1)
    best = scores.view(-1, GROUPS, N // GROUPS).max(dim=-1).values
    mask = torch.zeros_like(best).scatter(1, best.topk(2)[1], 1)
    mask = mask.unsqueeze(-1).expand(-1, GROUPS, N // GROUPS).reshape(-1, N)
    indices = scores.masked_fill(~mask.bool(), 0.0).topk(TOP_K)[1]
    return scores.gather(1, indices), indices


def groups_by(best: Callable[[Tensor], Tensor], value: float = 1.0) -> Any:
    def choose(x: Tensor, b: Tensor) -> Any:
        scores = x.sigmoid()
        of_groups = best((scores + b).view(-1, GROUPS, N // GROUPS))
        mask = torch.zeros_like(of_groups).scatter(1, of_groups.topk(2)[1], value)
        mask = mask.unsqueeze(-1).expand(-1, GROUPS, N // GROUPS).reshape(-1, N)
        indices = (scores + b).masked_fill(~mask.bool(), 0.0).topk(TOP_K)[1]
        return scores.gather(1, indices), indices

    return choose


def by_mask(change: Callable[[Tensor], Tensor]) -> Any:
    def choose(x: Tensor, b: Tensor) -> Any:
        scores = x.sigmoid()
        best = scores.view(-1, GROUPS, N // GROUPS).topk(2)[0].sum(-1)
        mask = torch.zeros_like(best).scatter(1, best.topk(2)[1], 1)
        mask = mask.unsqueeze(-1).expand(-1, GROUPS, N // GROUPS).reshape(-1, N)
        indices = scores.masked_fill(change(mask.bool()), 0.0).topk(TOP_K)[1]
        return scores.gather(1, indices), indices

    return choose


def biased_weights(x: Tensor, b: Tensor) -> Any:
    return tuple((x.sigmoid() + b).topk(TOP_K))


def other_weights(x: Tensor, b: Tensor) -> Any:
    indices = x.topk(TOP_K)[1]
    return (x * 2).softmax(-1).gather(1, indices), indices


def other_choice(x: Tensor, b: Tensor) -> Any:
    scores = x.sigmoid()
    indices = (scores * 2 + b).topk(TOP_K)[1]
    return scores.gather(1, indices), indices


def softmax_of_biased(x: Tensor, b: Tensor) -> Any:
    value, indices = (x + b).topk(TOP_K)
    return value.softmax(-1), indices


def rounded_scores(x: Tensor, b: Tensor) -> Any:
    scores = x.bfloat16().sigmoid()
    indices = (scores + b).topk(TOP_K)[1]
    return scores.gather(1, indices), indices


def llama_4(x: Tensor, b: Tensor) -> Any:
    value, indices = torch.topk(x, 1, dim=1)
    return torch.full_like(x, float("-inf")).scatter_(1, indices, value).sigmoid()


def written_through_a_view(x: Tensor, b: Tensor) -> Any:
    scores = x.sigmoid()
    biased = scores + b
    biased.view(-1, GROUPS, N // GROUPS)[:, 0] = -1.0
    indices = biased.topk(TOP_K)[1]
    return scores.gather(1, indices), indices


def an_activation_among_the_scores(x: Tensor, b: Tensor) -> Any:
    scores = x.sigmoid()
    indices = (scores + x.mean(0).cos()).topk(TOP_K)[1]
    return scores.gather(1, indices), indices


def softmax_over_tokens(x: Tensor, b: Tensor) -> Any:
    return tuple(x.softmax(0).topk(TOP_K))


def smallest(x: Tensor, b: Tensor) -> Any:
    return tuple(x.softmax(-1).topk(TOP_K, largest=False))


def of_half_of_them(x: Tensor, b: Tensor) -> Any:
    return tuple(x[:, : N // 2].softmax(-1).topk(TOP_K))


NEAR_MISSES: dict[str, tuple[Any, str]] = {
    "groups by their largest": (
        groups_by_their_largest,
        "groups are chosen by amax(..., 6), and not by the sum of their best two scores"),
    "groups by all": (
        groups_by(lambda x: x.sum(-1)),
        "groups are chosen by sum(..., 6), and not by the sum of their best two scores"),
    "groups by three": (
        groups_by(lambda x: x.topk(3)[0].sum(-1)),
        "groups are chosen by sum(..., 3), and not by the sum of their best two scores"),
    "a mask the other way": (
        by_mask(lambda mask: mask),
        "scores are masked by scatter(..., 4, ..., 1), and not by groups"),
    "a mask of zeros": (
        groups_by(lambda x: x.topk(2)[0].sum(-1), 0.0),
        "scores are masked by scatter(..., 4, ..., 0), and not by groups"),
    "biased weights": (
        biased_weights,
        "the weights come from add(..., ...), and not from a softmax or sigmoids of the logits"),
    "other weights": (
        other_weights,
        "the weights come from softmax(..., 24), and not from a softmax or sigmoids of the logits"),
    "other choice": (
        other_choice,
        "the choice is by add(..., ...), and not by the scores or these with a bias"),
    "softmax of biased": (
        softmax_of_biased,
        "the weights come from add(..., ...), and not from a softmax or sigmoids of the logits"),
    "rounded scores": (
        rounded_scores,
        "the weights come from round(..., bfloat16), and not from a softmax or sigmoids of the"
        " logits"),
    "Llama 4": (
        llama_4,
        "the weights come from the logits, and not from a softmax or sigmoids of the logits"),
    "written through a view": (written_through_a_view, UNKNOWN),
    "an activation": (an_activation_among_the_scores, UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_not_a_choice_that_the_op_knows(rewrite: Any, case: str) -> None:
    body, reason = NEAR_MISSES[case]
    got = rewrite(Model(body), tokens(50, 32))
    assert got.of(PASS) == [(False, reason)]
    assert "router_topk" not in got.graph


def test_not_a_row_of_sums(rewrite: Any) -> None:
    """Without keepdim, k tokens: each weight is divided by the sum of another token."""

    def body(x: Tensor, b: Tensor) -> Any:
        w, ids = x.softmax(-1).topk(TOP_K)
        return w / w.sum(-1), ids

    got = rewrite(Model(body), tokens(TOP_K, 32), tolerance=1e-6)
    assert got.of(PASS) == [(True, "top 4 of 24, softmax")]
    assert "softmax, 1, 1, 0.0, False, 1.0)" in got.graph  # not renormalized


def chosen(scores: Tensor, biased: Tensor, k: int = TOP_K) -> Any:
    ids = biased.topk(k)[1]
    return scores.gather(1, ids), ids


REFUSED: dict[str, tuple[Any, str]] = {
    "no expert": (lambda x, b: chosen(x.sigmoid(), x.sigmoid() + b, 0), "top_k = 0, n = 24"),
    "a bias of integers": (lambda x, b: chosen(x.sigmoid(), x.sigmoid() + b), "bias of int64"),
    "a bias for each token": (
        lambda x, b: chosen(x.sigmoid(), x.sigmoid() + b.float()), "its bias is [5, 24], not [24]"),
}  # fmt: skip
BIASES = {
    "a bias of integers": torch.arange(N) % 3,
    "a bias for each token": torch.arange(5.0 * N).view(5, N).cos(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_not_what_the_op_refuses(rewrite: Any, case: str) -> None:
    body, reason = REFUSED[case]
    model = Model(body)
    model.bias = BIASES.get(case, model.bias)
    got = rewrite(model, tokens(5, 32), tolerance=1e-6)
    ((fired, said),) = got.of(PASS)
    assert not fired
    assert reason in said
    assert "router_topk" not in got.graph


def test_not_the_best_of_no_groups(rewrite: Any) -> None:
    def body(x: Tensor, b: Tensor) -> Any:
        scores = x.sigmoid()
        best = scores.view(-1, GROUPS, N // GROUPS).topk(2)[0].sum(-1)
        mask = torch.zeros_like(best).scatter(1, best.topk(0)[1], 1)
        mask = mask.unsqueeze(-1).expand(-1, GROUPS, N // GROUPS).reshape(-1, N)
        # All count as 0, and are equal: which are chosen is not compared.
        w = scores.gather(1, scores.masked_fill(~mask.bool(), 0.0).topk(TOP_K)[1])
        return torch.zeros_like(w)

    got = rewrite(Model(body), tokens(5, 32))
    ((fired, said),) = got.of(PASS)
    assert not fired
    assert "top_groups = 0" in said


@pytest.mark.parametrize("body", [softmax_over_tokens, smallest, of_half_of_them])
def test_not_what_is_chosen_from_other_numbers(rewrite: Any, body: Any) -> None:
    got = rewrite(Model(body), tokens(50, 32))
    # Half of the experts are not even a step of the scores.
    assert got.of(PASS) == ([] if body is of_half_of_them else [(False, UNKNOWN)])
    assert "router_topk" not in got.graph


BEHIND: dict[str, Any] = {
    "a sum that may be 0": lambda x, w: w / w.sum(-1, keepdim=True),
    "another number": lambda x, w: w / (w.sum(-1, keepdim=True) + 1e-9),
    "a clamped sum": lambda x, w: w / w.sum(-1, keepdim=True).clamp(min=1e-12),
    "their largest": lambda x, w: w / w.amax(-1, keepdim=True),
    "a softmax of them": lambda x, w: w.softmax(-1),
    "another sum": lambda x, w: w / (x.sigmoid().sum(-1, keepdim=True) + 1e-20),
}


@pytest.mark.parametrize("case", BEHIND)
def test_what_it_does_not_know_stays_behind_the_weights(rewrite: Any, case: str) -> None:
    def body(x: Tensor, b: Tensor) -> Any:
        w, ids = x.sigmoid().topk(TOP_K)
        return BEHIND[case](x, w), ids

    got = rewrite(Model(body), tokens(50, 32), tolerance=1e-6)
    assert got.of(PASS) == [(True, "top 4 of 24, sigmoid")]
    assert "sigmoid, 1, 1, 0.0, False, 1.0)" in got.graph  # not renormalized
    assert "div(" in got.graph or "softmax(%" in got.graph


def test_a_factor_of_each_expert_stays_behind_it(rewrite: Any) -> None:
    def scaled(x: Tensor, b: Tensor) -> Any:
        weights, ids = softmax(x, b)
        return dense(weights * b[ids], ids)

    got = rewrite(Model(scaled), tokens(50, 32), tolerance=1e-6)
    assert got.of(PASS) == [(True, "top 4 of 24, softmax")]


def test_a_write_behind_it_goes_to_its_result(rewrite: Any) -> None:
    def zeroed(x: Tensor, b: Tensor) -> Any:
        weights, ids = softmax(x, b)
        ids[0] = 0
        weights[0] = 1.0
        return weights, ids

    got = rewrite(Model(zeroed), tokens(50, 32), tolerance=1e-6)
    assert got.of(PASS) == [(True, "top 4 of 24, softmax")]


def test_not_where_a_write_in_between_changes_the_ids(rewrite: Any) -> None:
    def moved(x: Tensor, b: Tensor) -> Any:
        scores = x.sigmoid()
        ids = scores.topk(TOP_K)[1]
        ids.clamp_(max=N // 2)
        return scores.gather(1, ids), ids

    got = rewrite(Model(moved), tokens(50, 32))
    assert got.of(PASS) == [(False, UNKNOWN)]


OTHERS: dict[str, Any] = {
    "scores": lambda scores, biased, raw: scores,
    "biased": lambda scores, biased, raw: biased,
    "raw": lambda scores, biased, raw: raw,
}


@pytest.mark.parametrize("name", OTHERS)
def test_not_where_others_read_what_is_in_between(rewrite: Any, name: str) -> None:
    def body(x: Tensor, b: Tensor) -> Any:
        scores = x.sigmoid()
        biased = scores + b
        ids = biased.topk(TOP_K)[1]
        raw = scores.gather(1, ids)
        weights = raw / (raw.sum(-1, keepdim=True) + 1e-20)
        return weights, ids, OTHERS[name](scores, biased, raw)

    got = rewrite(Model(body), tokens(50, 32))
    assert got.of(PASS) == [(False, f"output reads {name}, a value inside the choice")]


def test_not_where_weights_are_read_before_they_are_divided_in_place(rewrite: Any) -> None:
    def body(x: Tensor, b: Tensor) -> Any:
        weights, ids = x.softmax(-1).topk(TOP_K)
        before = weights.cos()
        weights /= weights.sum(-1, keepdim=True)
        return weights, ids, before

    got = rewrite(Model(body), tokens(50, 32))
    [(fired, reason)] = got.of(PASS)
    assert not fired
    assert "cos" in reason or "before" in reason


@pytest.mark.parametrize("through_a_view", [False, True])
def test_not_where_the_logits_are_written(rewrite: Any, through_a_view: bool) -> None:
    def body(x: Tensor, b: Tensor) -> Any:
        y = softmax(x, b)
        (x.t() if through_a_view else x).add_(1.0)
        return y

    got = rewrite(Model(body), tokens(50, 32))
    assert got.of(PASS) == [(False, "the graph writes the logits")]


def test_not_where_the_bias_is_written(rewrite: Any) -> None:
    def body(x: Tensor, b: Tensor) -> Any:
        scores = x.sigmoid()
        ids = (scores + b).topk(TOP_K)[1]
        b.add_(1.0)
        return scores.gather(1, ids), ids

    model = Model(body)
    kept = model.bias.clone()

    def again(x: Tensor) -> Any:
        model.bias.copy_(kept)
        return model(x)

    got = rewrite(again, tokens(50, 32))
    assert got.of(PASS) == [(False, UNKNOWN)]
