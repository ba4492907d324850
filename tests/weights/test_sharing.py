"""Weights of compiled models that something else has a part in: LoRA, parametrizations, copies of
the model, ties."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import compile_ext

pytestmark = pytest.mark.usefixtures("no_grad")


def gemm(x: Tensor, w: Tensor) -> Tensor:
    """Padded by the contract of the op."""
    out: Tensor = torch.ops.compile_ext_weights.gemm(x, w)
    return out


def pad_by_hand(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, F.pad(w, (0, 0, 0, 2)))[:, :30]


@pytest.mark.parametrize("run", [pad_by_hand, gemm], ids=["F.pad", "contract"])
def test_a_lora_is_merged_and_unmerged(
    run: Any, options: dict[str, Any], one_weight: Any, compile_it: Any, assert_close: Any
) -> None:
    model, x = one_weight(run, torch.randn(30, 16)), torch.randn(4, 16)
    compiled = compile_it(model, options)
    update = torch.randn(30, 2) @ torch.randn(2, 16)
    assert_close(compiled, model, x)
    before = compiled(x)
    model.w.add_(update)
    assert_close(compiled, model, x)
    # Of a difference of two results: each is a sum of 18 products of up to 2^4, rounded to 2^-24.
    torch.testing.assert_close(compiled(x) - before, x @ update.t(), rtol=2**-16, atol=2**-13)
    model.w.sub_(update)
    assert_close(compiled, model, x)


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


@pytest.mark.parametrize("budget", [{}, {"compile_ext.memory_budget": 2**20}], ids=str)
def test_a_parametrized_weight(
    budget: dict[str, Any],
    options: dict[str, Any],
    one_weight: Any,
    compile_it: Any,
    assert_close: Any,
) -> None:
    model, x = one_weight(gemm, torch.randn(30, 16)), torch.randn(4, 16)
    parametrize.register_parametrization(model, "w", Doubled())
    original = dict(model.named_parameters())["parametrizations.w.original"]
    compiled = compile_it(model, {**options, **budget})
    for _ in range(3):
        assert_close(compiled, model, x)
        original.mul_(1.5)
    folded = [d.fired for r in compile_ext.explain(model).rows for d in r.decisions]
    assert any(folded) == bool(budget)  # the product is larger than an eighth of the weights


@pytest.mark.parametrize("what", ["model", "compiled"])
def test_a_deepcopy_is_a_model_of_its_own(
    what: str, model: Any, x: Tensor, options: dict[str, Any], compile_it: Any, assert_same: Any
) -> None:
    compiled = compile_it(model, options)
    before = assert_same(compiled, model, x)
    if what == "model":
        twin = copy.deepcopy(model)
        compiled_twin = compile_it(twin, options)
    else:
        compiled_twin = copy.deepcopy(compiled)
        twin = compiled_twin._orig_mod
    assert torch.equal(assert_same(compiled_twin, twin, x), before)
    for p in twin.parameters():
        p.copy_(p.flip(0))
    assert not torch.equal(assert_same(compiled_twin, twin, x), before)
    assert torch.equal(assert_same(compiled, model, x), before)
    for p in model.parameters():
        p.data = p.flip(0)
    assert_same(compiled, model, x)
    assert_same(compiled_twin, twin, x)


@pytest.mark.parametrize("float8", [True, False], ids=["torch.save", "pickle"])
def test_a_saved_model_is_a_model_of_its_own(
    float8: bool,
    options: dict[str, Any],
    tmp_path: Path,
    new_model: Any,
    one_weight: Any,
    compile_it: Any,
    assert_close: Any,
) -> None:
    if float8:  # plain pickle does not know the type
        model, x = new_model(), torch.randn(5, 64).bfloat16()
    else:
        model, x = one_weight(gemm, torch.randn(30, 16)), torch.randn(4, 16)
    compiled = compile_it(model, options)
    before = compiled(x)
    if float8:
        torch.save(model, tmp_path / "model")
        twin = torch.load(tmp_path / "model", weights_only=False)
    else:
        twin = pickle.loads(pickle.dumps(model))
    assert [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]
    compiled_twin = compile_it(twin, options)
    assert torch.equal(compiled_twin(x), before)
    for p in model.parameters():
        p.copy_(p.flip(0))
    assert_close(compiled, model, x)
    assert not torch.equal(compiled(x), before)
    assert torch.equal(compiled_twin(x), before)


def test_tied_weights(compile_it: Any, assert_close: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 16)
            self.head = nn.Linear(16, 30, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, at: Tensor) -> Tensor:
            return gemm(self.embedding(at), self.head.weight)

    model, at = Tied(), torch.tensor([0, 7, 29])
    compiled = compile_it(model)
    for _ in range(3):
        assert_close(compiled, model, at)
        model.embedding.weight.data.mul_(1.5)  # re-homed: no refresh
    assert model.head.weight is model.embedding.weight
