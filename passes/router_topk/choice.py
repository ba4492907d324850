"""Which call of ``router_topk`` gives the same weights as an expression, or how they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compile_ext.ops.router_topk import TINY
from compile_ext.passes.expressions.expression import Expr, InputNumber, to_float32


@dataclass(frozen=True)
class Choice:
    """A call of ``router_topk``.

    Args:
        ids: arguments of the expression ``top_ids`` of its ids: what is chosen from, how many of
            it, and top_k.
        numbers: those of it that are inputs of the graph.
        others: as in the op; ``bias`` is a leaf.
    """

    ids: tuple[Expr, int, int]
    bias: Expr | None
    scores: str
    groups: int
    top_groups: int
    masked: float
    renormalize: bool
    scale: float
    numbers: Sequence[InputNumber] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the op takes behind its bias."""
        groups = self.groups, self.top_groups, self.masked
        return self.ids[2], self.scores, *groups, self.renormalize, self.scale

    def __str__(self) -> str:
        _, n, k = self.ids
        groups = f", {self.top_groups} of {self.groups} groups" if self.groups > 1 else ""
        bias = ", bias" if self.bias is not None else ""
        return f"top {k} of {n}, {self.scores}{bias}{groups}"


def read_choice(weights: Expr, logits: Expr, n: int) -> Choice | str | None:
    """The choice among n experts that gives these weights; a reason why it is none that the op
    knows, or None where these are no weights of the chosen."""
    numbers: list[InputNumber] = []
    inner = weights.args[0] if weights.op == "round" else weights
    inner, scale = _without_scale(inner, numbers)
    inner, total = _without_division(inner)
    picked = _picked(inner)
    if picked is None or picked[1][1] != n:
        return None  # another step, or the two that stand for a group
    p, ids = picked
    is_of_chosen = p is None
    if p is None:
        p = ids[0]
    elif not _is_score(p, logits, n):
        what = "the logits" if _is_logits(p, logits) else p
        return f"the weights come from {what}, and not from a softmax or sigmoids of the logits"
    limited = _without_groups(ids[0], n)
    if isinstance(limited, str):
        return limited
    c, groups, top_groups, masked = limited
    bias = _bias(c, p, logits, groups)
    if isinstance(bias, str):
        return bias
    if is_of_chosen and not _is_logits(c, logits):
        return None  # a softmax behind the weights
    scores = "softmax" if is_of_chosen else p.op
    if total is not None:
        # Of softmaxes the largest is 1/n or more: 1e-20 changes no bit of a sum.
        is_large = scores == "softmax" and bias is None
        if is_of_chosen or not _is_sum(total, inner, ids[2], is_large, numbers):
            return None  # a division behind the weights
    renormalize = is_of_chosen or total is not None
    return Choice(ids, bias, scores, groups, top_groups, masked, renormalize, scale, tuple(numbers))


def _without_scale(x: Expr, numbers: list[InputNumber]) -> tuple[Expr, float]:
    scale = 1.0
    while x.op == "mul":
        factors = [a for a in x.args if not isinstance(a, Expr)]
        if len(factors) != 1:
            break
        scale *= _number(factors[0], numbers)
        x = next(a for a in x.args if isinstance(a, Expr))
    return x, scale


def _number(x: Any, numbers: list[InputNumber]) -> float:
    if isinstance(x, InputNumber):
        numbers.append(x)
        return x.value
    return float(x)


def _without_division(x: Expr) -> tuple[Expr, Expr | None]:
    """A quotient's parts."""
    if x.op != "div" or not all(isinstance(a, Expr) for a in x.args):
        return x, None
    return x.args


def _is_sum(total: Expr, weights: Expr, k: int, is_large: bool, numbers: list[InputNumber]) -> bool:
    """Whether what divides the weights is their sum as the op adds it up."""
    if k > 1:  # a sum of each row; without the repeat it would be one row of sums (k tokens)
        if total.op != "repeat" or total.args[1] != k:
            return False
        total = total.args[0]
    summed, added = total, 0.0
    if summed.op == "add" and not isinstance(summed.args[1], Expr):
        summed, added = summed.args[0], _number(summed.args[1], numbers)
    is_tiny = added == to_float32(TINY) or (added == 0.0 and is_large)
    return is_tiny and summed.op == "sum" and summed.args == (weights, k)


def _picked(x: Expr) -> tuple[Expr | None, tuple[Expr, int, int]] | None:
    """The scores that weights are read from, and the ids. No scores: it is a softmax of the
    chosen."""
    if x.op == "gather" and x.args[2].op == "top_ids":
        return x.args[0], x.args[2].args
    if x.op == "topk":
        return x.args[0], x.args
    if x.op == "softmax":
        chosen, k = x.args
        if chosen.op == "topk" and chosen.args[2] == k:
            return None, chosen.args
        if chosen.op == "gather" and chosen.args[2].op == "top_ids":
            ids = chosen.args[2].args
            if chosen.args[0] is ids[0] and ids[2] == k:
                return None, ids
    return None


def _is_score(p: Expr, logits: Expr, n: int) -> bool:
    is_whole = p.op == "sigmoid" or (p.op == "softmax" and p.args[1] == n)
    return is_whole and _is_logits(p.args[0], logits)


def _is_logits(x: Expr, logits: Expr) -> bool:
    """Also where they are rounded first: the op reads them as they are, which is closer to exact
    and keeps their order."""
    return (x.args[0] if x.op == "round" else x) is logits


def _bias(c: Expr, p: Expr, logits: Expr, groups: int) -> Expr | str | None:
    """What is added to the scores for the choice."""
    if c is p or (groups == 1 and _is_logits(c, logits)):
        return None
    if c.op == "add" and p in c.args:
        bias = c.args[1] if c.args[0] is p else c.args[0]
        if isinstance(bias, Expr) and bias.op == "leaf":
            return bias
    return f"the choice is by {c}, and not by the scores or these with a bias"


def _without_groups(c: Expr, n: int) -> tuple[Expr, int, int, float] | str:
    """What is chosen from before groups are masked, how many there are and stay, and what the
    others count."""
    if c.op != "masked_fill":
        return c, 1, 1, 0.0
    inner, mask, masked = c.args
    repeats, inverted = 1, False
    while mask.op in ("repeat", "bool", "not"):
        repeats *= mask.args[1] if mask.op == "repeat" else 1
        inverted ^= mask.op == "not"
        mask = mask.args[0]
    if mask.op != "scatter" or not inverted:
        return f"scores are masked by {mask}, and not by groups"
    into, groups, chosen, value = mask.args
    is_mask = into.op == "fill" and into.args[0] == 0.0 and value == 1.0
    if not is_mask or chosen.op != "top_ids" or groups * repeats != n or chosen.args[1] != groups:
        return f"scores are masked by {mask}, and not by groups"
    best, _, top_groups = chosen.args
    if top_groups == groups:
        return inner, 1, 1, 0.0
    is_sum = best.op == "sum" and best.args[1] == 2 and best.args[0].op == "topk"
    if not is_sum or best.args[0].args != (inner, repeats, 2):
        return f"groups are chosen by {best}, and not by the sum of their best two scores"
    return inner, groups, top_groups, masked
