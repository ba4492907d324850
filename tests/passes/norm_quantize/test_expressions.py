"""Equal expressions hold equal bits; what may differ in a bit has another expression, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_ext.passes.expressions.expression import Expr, Match, Table, shortest, to_float32
from compile_ext.passes.expressions.trace import Trace, expressions_of

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16


def expressions(*functions: Callable[[Tensor], Tensor]) -> list[Expr | None]:
    """Of functions of x [6, 8] bfloat16, in one table; None where there is no rule."""
    table, found = Table(), []
    for function in functions:
        try:
            found += expressions_of(lambda x: (function(x),), {"x": sample()}, table)  # noqa: B023
        except AssertionError:
            found.append(None)
    return found


def sample() -> Tensor:
    x = torch.randn(6, 8) * torch.logspace(-12, 3, 6).unsqueeze(1)
    x[1, 3], x[2, 5], x[3, 1] = 0.0, torch.nan, torch.inf
    return x.bfloat16()


SAME: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "views": (lambda x: x.view(3, 16).abs(), lambda x: x.abs().unsqueeze(0).flatten()),
    "exact casts": (lambda x: x.abs().amax(-1).float(), lambda x: x.float().abs().amax(-1)),
    "casts there and back": (lambda x: x * x, lambda x: (x * x).float().double().bfloat16()),
    "promotion": (lambda x: x * x.float(), lambda x: x.float() * x.float()),
    "order of factors": (lambda x: x * x.abs(), lambda x: x.abs() * x),
    "bfloat16 arithmetic": (lambda x: x / x.abs(), lambda x: (x.float() / x.abs()).bfloat16()),
    "square": (lambda x: x.float() ** 2, lambda x: x.float().square()),
    "one over": (lambda x: 1 / x.float(), lambda x: x.float().reciprocal()),
    "power": (lambda x: x.float().abs() ** -0.5, lambda x: x.float().abs().rsqrt()),
    "mean": (lambda x: x.float().mean(-1), lambda x: x.float().sum(1, keepdim=True) / 8),
    "clamp": (lambda x: x.float().clamp(-2, 3), lambda x: x.float().clamp_max(3).clamp_min(-2)),
    "maximum": (
        lambda x: x.float().clamp(min=1e-10),
        lambda x: torch.maximum(torch.full((1,), 1e-10), x.float())),
    "max": (lambda x: x.amax(-1), lambda x: x.max(dim=1, keepdim=True).values),
    "broadcast": (
        lambda x: x / x.amax(-1, keepdim=True),
        lambda x: x / x.amax(-1).unsqueeze(-1).expand(6, 8)),
    "in place": (lambda x: x.float() * 2 + 1, lambda x: x.float().mul_(2).add_(1)),
    "eps in double": (lambda x: x.float() + 1e-6, lambda x: x.float() + to_float32(1e-6)),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_same(case: str) -> None:
    first, second = expressions(*SAME[case])
    assert first is second
    assert first is not None
    x = sample()
    left, right = (f(x).double().flatten() for f in SAME[case])
    assert torch.equal(left.nan_to_num(7e300), right.nan_to_num(7e300))


DIFFERENT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "root": (lambda x: x.float().abs().rsqrt(), lambda x: 1 / x.float().abs().sqrt()),  # 1 ulp
    "rounding": (lambda x: x.float() * x, lambda x: (x * x).float()),
    "float16": (lambda x: x.half(), lambda x: x),
    "order of products": (
        lambda x: x * x.abs() * x.float(), lambda x: x * (x.abs() * x.float())),
    "quotient": (lambda x: x.float() / x.abs(), lambda x: x * (1 / x.float().abs())),
    "a bound rounded to bfloat16": (
        lambda x: x.float().clamp(min=to_float32(1e-10)),
        lambda x: x.clamp(min=to_float32(1e-10)).float()),
    "a number in bfloat16": (lambda x: (x + 0.1).float(), lambda x: x.float() + 0.1),
    "crossed bounds": (
        lambda x: x.float().clamp(max=-1).clamp(min=1),
        lambda x: x.float().clamp(min=1).clamp(max=-1)),
    "which run": (lambda x: x.view(3, 16).amax(-1), lambda x: x.amax(-1)),
    "columns": (lambda x: x.amax(0), lambda x: x.amax(-1)),
    "mean of bfloat16": (lambda x: x.mean(-1), lambda x: x.float().mean(-1).bfloat16()),
    "another alpha": (lambda x: torch.sub(x.float(), x, alpha=2), lambda x: x.float() - x),
    "rounding mode": (
        lambda x: torch.div(x.float(), 3.0, rounding_mode="floor"), lambda x: x.float() / 3.0),
    "transposed": (lambda x: x.t().contiguous().view(6, 8), lambda x: x),
    "a part": (lambda x: x[:, :4].abs(), lambda x: x.abs()),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_different(case: str) -> None:
    first, second = expressions(*DIFFERENT[case])
    assert first is None or first is not second


def test_a_view_of_what_is_written_is_not_clear() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(sample())
        trace = Trace([x])
        with trace:
            y = x.clone()
            view = y.view(-1)
            y.add_(1)
    assert not trace.is_clear
    assert view.shape == (48,)


def test_one_fake_for_two_inputs_is_not_clear() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(sample())
    assert not Trace([x, x]).is_clear


def test_match_binds_numbers_and_parts() -> None:
    table = Table()
    x = table("leaf", "x", "float32")
    pattern = table("add", table("mul", table("var", "x"), table("var", "x")), 0.5)
    square = table("add", table("mul", x, x), 0.25)
    match = Match({0.5: "eps"})
    assert match.fits(pattern, square)
    assert match.numbers == {"eps": 0.25}
    assert match.found[table("var", "x")] is x
    other = table("add", table("mul", x, table("abs", x)), 0.25)
    assert not Match({0.5: "eps"}).fits(pattern, other)
    assert not Match({0.5: "eps"}).fits(pattern, table("add", table("mul", x, x), "zf0"))


def test_a_misfit_names_the_first_difference() -> None:
    table = Table()
    x = table("leaf", "x", "float32")
    match = Match({})
    pattern = table("div", table("clamp", table("var", "x"), to_float32(1e-10), None), 448.0)
    assert not match.fits(pattern, table("div", table("clamp", x, to_float32(1e-12), None), 448.0))
    assert match.misfit is not None
    assert [str(e) for e in match.misfit] == ["clamp(..., 1e-10, None)", "clamp(..., 1e-12, None)"]


@pytest.mark.parametrize("value", [1e-6, 1e-5, 1e-10, 0.1, 1.0, 448.0])
def test_shortest(value: float) -> None:
    assert shortest(to_float32(value)) == value
    assert to_float32(shortest(to_float32(value))) == to_float32(value)
