"""What fed a stripped argument goes with it, unless it does more than that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from compile_ext.passes import dead_code
from compile_ext.passes.fills import overwritten_outputs
from compile_ext.passes.values import storage

PASS = "strip_placeholder_fills"
SHARED = (True, "s is not read: a shared buffer, uninitialised")
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills


def quantized_by_an_op(x: Tensor) -> Tensor:
    """The scale goes, and with it the call that makes it: nobody reads q either."""
    q, s = torch.empty_like(x), x.new_empty(5, 1)
    fills.quantize(x, q, s)
    return fills.ignores(x, s)


def quantized_by_an_overload(x: Tensor) -> Tensor:
    q, s = torch.zeros_like(x), x.new_zeros(5, 1)
    fills.quantize.default(x, q, s=s)
    return fills.ignores(x, s.view(-1))


def quantized_in_pytorch(x: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
    return fills.ignores(x, scale.to(torch.float32).contiguous())


def quantized_on_copies(x: Tensor) -> Tensor:
    q, s = torch.zeros_like(x), x.new_zeros(5, 1)
    made: Any = auto_functionalized(fills.quantize.default, x=x, q=q, s=s)
    return fills.ignores(x, made[2])


def by_a_function(x: Tensor) -> Tensor:
    return fills.ignores(x, fills.function(x.exp()).abs())


def cast(x: Tensor) -> Tensor:
    return fills.ignores(x, x.bfloat16().float().contiguous())


def built_up(x: Tensor) -> Tensor:
    s = torch.empty(2, 8)
    s[0] = x.sum(0)
    s[1].copy_(x.amax(0))
    return fills.ignores(x, s)


def two_layers(x: Tensor) -> Tensor:
    """Each unread argument comes from the one before."""
    s = x.new_ones(1)
    for _ in range(3):
        s = fills.ignores(x, s)
    return fills.ignores(x, s)


DEAD = {
    f.__name__: f
    for f in (
        *(quantized_by_an_op, quantized_by_an_overload, quantized_in_pytorch),
        *(quantized_on_copies, by_a_function, cast, built_up, two_layers),
    )
}


@pytest.mark.parametrize("model", DEAD.values(), ids=DEAD)
def test_work_for_an_unread_argument_goes(rewrite: Any, op_calls: list[str], model: Any) -> None:
    got = rewrite(model, torch.randn(5, 8))
    assert got.of(PASS)[-1] == SHARED
    calls = [n for n in got.modules[-1].graph.nodes if n.op not in ("placeholder", "output")]
    assert [str(n.target).removesuffix(".default") for n in calls] == ["compile_ext_fills.ignores"]
    assert len(op_calls) <= 1  # in eager


def test_scale_is_dead_and_the_values_are_not(rewrite: Any) -> None:
    """A quantization whose values are read stays, in full: one op makes both."""

    def model(x: Tensor) -> Tensor:
        q, s = torch.zeros_like(x), x.new_zeros(5, 1)
        fills.quantize(x, q, s)
        return fills.ignores(q, s)

    assert_expected_inline(
        rewrite(model, torch.randn(5, 8)).graph,
        """\
arg0: float32[5, 8]
arg1: float32[5, 1] = uninitialised
%0: float32[5, 8] = empty([5, 8], device=cpu, dtype=float32)
%1: float32[5, 1] = empty([5, 1], device=cpu, dtype=float32)
%2 = compile_ext_fills::quantize(arg0, %0, %1)
%3: float32[5, 8] = compile_ext_fills::ignores(%0, arg1)
return [%3]""",
    )


def test_weight_scale(rewrite: Any) -> None:
    """Computed from a parameter that requires grad, under no_grad."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return fills.ignores(x, 1 / self.s + x[0, :1])

    got = rewrite(Model(), torch.randn(5, 8))
    assert SHARED in got.of(PASS)
    assert "add" not in got.graph


def seeded(x: Tensor) -> Tensor:
    return fills.ignores(x, torch.rand(5, 8))


def seeded_in_place(x: Tensor) -> Tensor:
    return fills.ignores(x, torch.empty(1).uniform_())


def dropout(x: Tensor) -> Tensor:
    return fills.ignores(x, torch.nn.functional.dropout(x, 0.5, training=True))


def bernoulli(x: Tensor) -> Tensor:
    return fills.ignores(x, torch.bernoulli(x.sigmoid()).bfloat16())


def drawn_by_an_op(x: Tensor) -> Tensor:
    return fills.ignores(x, fills.draws(x))


RANDOM = {f.__name__: f for f in (seeded, seeded_in_place, dropout, bernoulli, drawn_by_an_op)}


@pytest.mark.parametrize("model", RANDOM.values(), ids=RANDOM)
def test_random_numbers_are_drawn(rewrite: Any, model: Any) -> None:
    """What is drawn behind it depends on them."""
    x = torch.randn(5, 8)
    assert rewrite(model, x).of(PASS)[-1] == SHARED
    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    states = []
    for call in (model, compiled):
        torch.manual_seed(1)
        call(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def effect(x: Tensor) -> Tensor:
    return fills.ignores(x, fills.effect(x))


def effect_of_an_overload(x: Tensor) -> Tensor:
    return fills.ignores(x, fills.effect.default(x) + 1)


def effect_inside(x: Tensor) -> Tensor:
    """An effect behind work that only the effect reads."""
    return fills.ignores(x, fills.effect(x.exp()).mul(2))


def undeclared_write(x: Tensor) -> Tensor:
    """A mutable op without a contract: nothing says that it does no more than write."""
    s = torch.zeros(5, 8)
    fills.effect_out(x, s)
    return fills.ignores(x, s)


EFFECTS = {f.__name__: f for f in (effect, effect_of_an_overload, effect_inside, undeclared_write)}


@pytest.mark.parametrize("model", EFFECTS.values(), ids=EFFECTS)
def test_effects_stay(rewrite: Any, op_calls: list[str], model: Any) -> None:
    got = rewrite(model, torch.randn(5, 8))
    assert got.of(PASS)[0] == SHARED
    assert op_calls == ["effect"] * 2  # eager, compiled


def test_writes_that_the_caller_sees_stay(rewrite: Any) -> None:
    def model(x: Tensor, cache: Tensor) -> Tensor:
        cache[0] = x[0]
        return fills.ignores(x, cache.view(-1).mul_(2))

    x, cache = torch.randn(5, 8), torch.ones(2, 8)
    rewrite(model, x, cache)
    assert torch.equal(cache[1], torch.full((8,), 4.0))  # eager, compiled
    assert torch.equal(cache[0], 2 * x[0])


def test_a_buffer_that_others_read_keeps_its_writes(rewrite: Any) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.zeros(2, 8)
        s[0] = x.sum(0)
        y = fills.ignores(x, s[0])
        s[1] = 3.0
        return y, s[:, 0] + 1

    got = rewrite(model, torch.randn(5, 8))
    assert got.of(PASS)[0] == SHARED
    assert got.graph.count("setitem") == 2


def test_cost_grows_with_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with its square: a decoder writes thousands of buffers."""
    looks = 0

    def counted(value: Any) -> int | None:
        nonlocal looks
        looks += 1
        return storage(value)

    for module in (dead_code, overwritten_outputs):
        monkeypatch.setattr(module, "storage", counted)

    def cost(n: int) -> int:
        nonlocal looks
        looks = 0

        def model(x: Tensor) -> Tensor:
            for _ in range(n):
                out = torch.zeros(5, 8)
                ops.copy_out(x, out)
                x = out
            return x

        torch._dynamo.reset()
        call = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
        x = torch.randn(5, 8)
        assert torch.equal(call(x), x)
        return looks

    assert cost(40) <= 2.2 * cost(20)
