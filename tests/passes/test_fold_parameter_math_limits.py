"""What fold_parameter_math leaves alone, what it may cost, and how its constants are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compile_ext
from compile_ext.passes import PassContext, run_passes

PASS = "fold_parameter_math"
ROOMY = {"compile_ext.memory_budget": 2**20}
ROUNDING = 1e-4  # sums of 8 products of up to ~30 in another order
ops = torch.ops.compile_ext_tests


class Model(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.w = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def compiled(model: Any) -> Any:
    return torch.compile(
        model, backend="compile_ext", options={"compile_ext.inner": "eager", **ROOMY}
    )


def written_later(m: Model, x: Tensor) -> Tensor:
    w = m.w * 2
    y = F.linear(x, w)
    w.add_(x.sum())
    return y + F.linear(x, w)


def written_through_a_view(m: Model, x: Tensor) -> Tensor:
    w = m.w * 2
    w[0].mul_(x.sum())
    return F.linear(x, w)


def read_too_early(m: Model, x: Tensor) -> Tensor:
    buf = m.w.clone()
    y = F.linear(x, buf)
    buf[:3] = m.w[3:]
    return y + F.linear(x, buf)


def autocast(m: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x, m.w * 2)


LEFT_ALONE: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "returned": (lambda m, x: (m.w * 2, x + 1), "the graph hands the result out"),
    "view returned": (lambda m, x: ((m.w * 2).t(), x + 1), "the graph hands the result out"),
    "written later": (written_later, "the graph writes the result"),
    "written through a view": (written_through_a_view, "the graph writes the result"),
    "read too early": (read_too_early, "it is read before it is complete"),
    "autocast": (autocast, "it is inside an autocast region"),
}


@pytest.mark.parametrize(("run", "reason"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_not(rewrite: Any, run: Any, reason: str) -> None:
    got = rewrite(Model(run), torch.randn(5, 8), options=ROOMY)
    assert (False, reason) in got.of(PASS)
    assert not any(fired for fired, _ in got.of(PASS))


def test_not_to_another_device() -> None:
    # Not with the fixture: a tensor on the meta device has no values to compare.
    model = Model(lambda m, x: x.to("meta") @ (m.w + 1).to("meta").t())
    options = {"compile_ext.inner": "eager", **ROOMY}
    compiled = torch.compile(model, backend="compile_ext", options=options)
    with torch.no_grad():
        assert compiled(torch.randn(5, 8)).shape == (5, 6)
    rows = compile_ext.explain(model).rows
    assert [(d.fired, d.detail) for row in rows for d in row.decisions] == [
        (False, "it moves to another device")
    ]


@pytest.mark.parametrize("noise", [torch.rand_like, lambda w: F.dropout(w, 0.5, True)])
def test_not_random_numbers(rewrite: Any, noise: Any) -> None:
    got = rewrite(Model(lambda m, x: F.linear(x, noise(m.w) * 0)), torch.randn(5, 8), options=ROOMY)
    assert got.of(PASS) == []


def test_not_with_a_gradient(rewrite: Any) -> None:
    got = rewrite(Model(lambda m, x: F.linear(x, m.w * 2)), torch.randn(5, 8), grad=True)
    assert got.of(PASS) == [(False, "it needs a gradient")]


class Sizes(nn.Module):
    """Results of 64, 32 and 512 bytes; 4096 bytes of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.randn(124, 8))
        self.w = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        half, row = self.w[:2] * 2, self.w[0] + 1
        large = self.w.repeat(4, 1) + 1
        return F.linear(x * row, half).sum() + F.linear(x, large) + F.linear(x, self.big).sum()


@pytest.mark.parametrize(
    ("budget", "fired"), [(None, 2), (0, 0), (31, 0), (32, 1), (95, 1), (96, 2), (608, 3)]
)
def test_budget_smallest_first(rewrite: Any, budget: int | None, fired: int) -> None:
    options = {} if budget is None else {"compile_ext.memory_budget": budget}
    got = rewrite(Sizes(), torch.randn(5, 8), options=options)
    found = got.of(PASS)
    assert [f for f, _ in found].count(True) == fired
    if budget is None:  # an eighth of 4096 bytes
        assert any("416 of 512 are left (compile_ext.memory_budget)" in text for _, text in found)


def test_pads_are_free_by_default_only(rewrite: Any) -> None:
    model, x = Model(lambda m, x: F.linear(x, F.pad(m.w, (0, 0, 0, 58)))), torch.randn(5, 8)
    got = rewrite(model, x, options={"compile_ext.memory_budget": 100})
    assert [fired for fired, _ in got.of(PASS)] == [False]
    torch._dynamo.reset()
    assert rewrite(model, x).of(PASS)[-1][0]


def test_idempotent(rewrite: Any) -> None:
    got = rewrite(Model(lambda m, x: F.linear(x, m.w * 2)), torch.randn(5, 8), options=ROOMY)
    before = got.graph
    run_passes(PassContext(got.modules[-1], [torch.randn(1)] * 9))
    assert got.graph == before


def test_eight_layers_share_one_graph(rewrite: Any) -> None:
    layers = [Model(lambda m, x: F.linear(x, m.w * 2)) for _ in range(8)]
    x = torch.randn(5, 8)
    got = rewrite(layers[0], x, options=ROOMY)
    run = compiled(lambda layer, x: F.linear(x, layer.w * 2))
    with torch.no_grad():
        for _ in range(2):
            for layer in layers:
                assert torch.equal(run(layer, x), layer(x))
                layer.w.add_(1)
    assert len(got.modules) == 2


REGION: Any = torch.compiler.nested_compile_region(lambda x, w: F.linear(x, w))
BODIES: dict[str, Callable[[Any, Tensor], Any]] = {
    "checkpoint": lambda m, x: checkpoint(lambda x: F.linear(x, m.w * 2), x, use_reentrant=False),
    "region": lambda m, x: REGION(x, m.w * 2),
    "cond": lambda m, x: torch.cond(
        x.sum() > 0, lambda x: F.linear(x, m.w * 2), lambda x: F.linear(x, m.w + 1), (x,)
    ),
}


@pytest.mark.parametrize("run", BODIES.values(), ids=BODIES)
def test_in_bodies(rewrite: Any, run: Any) -> None:
    model, x = Model(run), torch.randn(5, 8)
    got = rewrite(model, x, options=ROOMY)
    assert got.of(PASS)
    assert all(fired for fired, _ in got.of(PASS))
    with torch.no_grad():
        model.w.mul_(3)
        assert torch.equal(compiled(model)(-x), model(-x))


def test_two_branches_pay_once(rewrite: Any) -> None:
    def run(m: Model, x: Tensor) -> Any:
        return torch.cond(
            x.sum() > 0, lambda x: F.linear(x, m.w * 2), lambda x: F.linear(-x, m.w * 2), (x,)
        )

    got = rewrite(Model(run), torch.randn(5, 8), options={"compile_ext.memory_budget": 192})
    assert all(fired for fired, _ in got.of(PASS))


def test_a_result_that_a_body_writes(rewrite: Any) -> None:
    def run(m: Model, x: Tensor) -> Any:
        def body(x: Tensor, w: Tensor) -> Tensor:
            return F.linear(x, w.add_(x.sum()))

        return checkpoint(body, x, m.w * 2, use_reentrant=False)

    model, x = Model(run), torch.randn(5, 8)
    rewrite(model, x, options=ROOMY)
    with torch.no_grad():  # the second call
        torch.testing.assert_close(compiled(model)(x), model(x), rtol=0, atol=ROUNDING)


def test_a_gemm_weight_that_an_activation_writes(rewrite: Any) -> None:
    def run(m: Model, x: Tensor) -> Any:
        w = m.w.clone()
        w.add_(x.sum())
        return ops.gemm(x, w, None, None, False)

    rewrite(Model(run), torch.randn(5, 8), options=ROOMY, tolerance=ROUNDING)


def test_a_gemm_weight_that_is_filled_and_handed_out(rewrite: Any) -> None:
    def run(m: Model, x: Tensor) -> Any:
        w = m.w.new_zeros(10, 8)
        w[:6] = m.w
        return ops.gemm(x, w, None, None, False), w

    rewrite(Model(run), torch.randn(5, 8), options=ROOMY, tolerance=ROUNDING)
