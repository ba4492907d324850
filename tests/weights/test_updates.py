"""Weights of compiled models that change, in every way of an update: as they are, and prepared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext

pytestmark = pytest.mark.usefixtures("no_grad")

HOMED = "re-homed: the parameter lives in it"
INDUCTOR = {"compile_ext.inner": "inductor"}
# Inductor may fuse a multiply and an add: one ulp of the hidden bfloat16 (2^-8) can become an FP8
# step (2^-3 of the value) of a few of the 50 hidden elements, each |w| < 0.6.
FP8_STEPS: dict[str, Any] = {"rtol": 2**-5, "atol": 0.1}

New = Callable[[], Any]  # makes a model with other weights


def each(model: Any, new: New, write: Callable[[nn.Parameter, Tensor], object]) -> None:
    values = new().state_dict()
    for name, p in model.named_parameters():
        write(p, values[name])


def in_inference_mode(model: Any, new: New) -> None:
    with torch.inference_mode():
        each(model, new, lambda p, t: p.copy_(t))


def new_parameters(model: Any, new: New) -> None:
    for layer in model.children():
        for name, p in [*layer.named_parameters()]:
            value = torch.randn(p.shape).to(p.dtype)
            setattr(layer, name, nn.Parameter(value, requires_grad=False))


def some(model: Any, new: New) -> None:
    model[0].weight_scale.mul_(2)
    model[1].weight.copy_(model[1].weight.flip(0))


def untraced(model: Any, new: New) -> None:
    each(model, new, lambda p, t: p.data.copy_(t))
    compile_ext.refresh(model)


def data_of_one(model: Any, new: New) -> None:
    model[0].weight.data = new()[0].weight.data


UPDATES: dict[str, Callable[[Any, New], object]] = {
    "copy_": lambda m, new: each(m, new, lambda p, t: p.copy_(t)),
    "a part": lambda m, new: each(m, new, lambda p, t: p[3:9].copy_(t[3:9])),
    "data.copy_ and refresh": untraced,
    "data =": lambda m, new: each(m, new, lambda p, t: setattr(p, "data", t)),
    "data = of one that is re-homed": data_of_one,
    "load_state_dict": lambda m, new: m.load_state_dict(new().state_dict()),
    "load_state_dict, assign": lambda m, new: m.load_state_dict(new().state_dict(), assign=True),
    "new parameters": new_parameters,
    "in inference mode": in_inference_mode,
    "new layers": lambda m, new: m.__setitem__(0, new()[0]),
    "some of the weights": some,
}


@pytest.fixture
def assert_seen(new_model: New, x: Tensor, assert_same: Any) -> Callable[..., Tensor]:
    """``(update, compiled, model)``: other results than before, those of the updated model."""

    def check(update: str, compiled: Any, model: Any) -> Tensor:
        before = assert_same(compiled, model, x)
        UPDATES[update](model, new_model)
        after: Tensor = assert_same(compiled, model, x)
        assert not torch.equal(after, before)
        return after

    return check


@pytest.mark.parametrize("update", UPDATES)
def test_every_update_is_seen(
    update: str, model: Any, options: dict[str, Any], compile_it: Any, assert_seen: Any
) -> None:
    compiled = compile_it(model, options)
    for _ in range(2):
        assert_seen(update, compiled, model)


def test_every_update_is_seen_with_inductor(
    model: Any, x: Tensor, new_model: New, compile_it: Any, row_of: Any
) -> None:
    compiled = compile_it(model, INDUCTOR)
    torch.testing.assert_close(compiled(x), model(x), **FP8_STEPS)
    for update in ("copy_", "data =", "load_state_dict, assign", "in inference mode"):
        UPDATES[update](model, new_model)
        torch.testing.assert_close(compiled(x), model(x), **FP8_STEPS)
    assert row_of(model, "0").constants == (HOMED,)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_same_values_give_the_same_bits(
    mode: type, model: Any, x: Tensor, options: dict[str, Any], compile_it: Any, assert_same: Any
) -> None:
    compiled = compile_it(model, options)
    with mode():
        before = assert_same(compiled, model, x)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        assert torch.equal(assert_same(compiled, model, x), before)


def test_writes_without_a_trace_are_live_in_a_re_homed_weight_and_need_refresh_in_a_copy(
    model: Any, x: Tensor, compile_it: Any, assert_same: Any
) -> None:
    compiled = compile_it(model)
    before = assert_same(compiled, model, x)
    model[0].weight.data.copy_(model[0].weight.flip(0))
    assert not torch.equal(assert_same(compiled, model, x), before)
    stale = assert_same(compiled, model, x)
    model[1].weight.data.copy_(model[1].weight.flip(0))
    assert torch.equal(compiled(x), stale)
    assert compile_ext.refresh(compiled) == 4  # 0: weight, scale, bias; 1: weight
    assert_same(compiled, model, x)


# ---- prepared models -----------------------------------------------------------------------------


@pytest.mark.parametrize("update", UPDATES)
def test_every_update_of_a_prepared_model_is_seen(
    update: str, model: Any, x: Tensor, compile_it: Any, assert_same: Any, assert_seen: Any
) -> None:
    compile_ext.prepare(model, x)
    compiled = compile_it(model)
    for _ in range(2):
        after = assert_seen(update, compiled, model)
        twin = copy.deepcopy(model)
        assert twin[1].weight.stride() == (50, 1)
        assert torch.equal(assert_same(compile_it(twin), twin, x), after)


def test_a_prepared_weight_takes_writes_without_a_trace(
    model: Any, x: Tensor, new_model: New, compile_it: Any, assert_same: Any
) -> None:
    compile_ext.prepare(model, x)
    compiled = compile_it(model)
    before = assert_same(compiled, model, x)
    each(model, new_model, lambda p, t: p.data.copy_(t))
    assert not torch.equal(assert_same(compiled, model, x), before)


def test_a_prepared_model_under_inductor_takes_them_too(
    model: Any, x: Tensor, new_model: New, compile_it: Any, row_of: Any
) -> None:
    compile_ext.prepare(model, x)
    compiled = compile_it(model, INDUCTOR)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x), **FP8_STEPS)
        each(model, new_model, lambda p, t: p.data.copy_(t))
    assert row_of(model, "1").constants == (HOMED,)
