"""``prepare`` moves weights before a model is compiled; ``restore`` gives plain tensors again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compile_ext

pytestmark = pytest.mark.usefixtures("no_grad")

HOMED = "re-homed: the parameter lives in it"
MOVED = {"0": "re-homed", "0.weight_scale": "re-homed", "0.bias": "re-homed", "1": "re-homed"}


def test_prepare_moves_what_is_padded(
    model: Any, x: Tensor, memory: Any, compile_it: Any, assert_same: Any, row_of: Any
) -> None:
    want = model(x)
    for _ in range(2):  # the second time, they live there
        assert compile_ext.prepare(model, x) == MOVED
    assert torch.equal(model(x), want)
    assert [p.stride() for p in (model[0].weight, model[1].weight)] == [(64, 1), (64, 1)]
    assert model[1].weight.shape == (64, 50)
    # One byte each: 50 rows of 64, and 64 rows of which the last one ends at 50.
    assert [memory(m.weight)[1] for m in model] == [50 * 64, 63 * 64 + 50]
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(compile_ext.CompileExtError, match="no live compilation"):
        compile_ext.explain(model)
    compiled = compile_it(model)
    assert torch.equal(assert_same(compiled, model, x), want)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert row_of(model, "1").constants == (HOMED,)


def gemm(x: Tensor, w: Tensor) -> Tensor:
    out: Tensor = torch.ops.compile_ext_weights.gemm(x, w)
    return out


Run = Callable[[Tensor, Tensor], Tensor]
STAY: dict[str, tuple[Run, Callable[[], Tensor], str]] = {
    "part": (gemm, lambda: torch.randn(60, 16)[:30], "it is a part of a larger tensor"),
    "numpy": (
        gemm,
        lambda: torch.from_numpy(torch.randn(30, 16).numpy().copy()),
        "its memory belongs to another library or to a file",
    ),
    "slice": (
        lambda x, w: gemm(x, w[2:]),
        lambda: torch.randn(32, 16),
        "it is computed (getitem then pad([0, 0, 0, 2], 0))",
    ),
    "front": (
        lambda x, w: gemm(x, F.pad(w, (0, 0, 2, 0))),
        lambda: torch.randn(30, 16),
        "it is padded in front",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_prepare_says_what_stays(
    name: str, one_weight: Any, compile_it: Any, assert_close: Any
) -> None:
    run, weight, reason = STAY[name]
    model, x = one_weight(run, weight()), torch.randn(4, 16)
    address = model.w.data_ptr()
    assert compile_ext.prepare(model, x) == {"w": reason}
    assert model.w.data_ptr() == address
    assert_close(compile_it(model), model, x)


def test_prepare_leaves_a_weight_that_is_in_use_and_one_that_fits(
    model: Any, x: Tensor, one_weight: Any
) -> None:
    held = model[1].weight.detach()
    found = compile_ext.prepare(model, x)
    assert found == {**MOVED, "1": "something else uses its memory"}
    assert held.data_ptr() == model[1].weight.data_ptr()
    assert compile_ext.prepare(one_weight(gemm, torch.randn(32, 16)), torch.randn(4, 16)) == {}


def test_prepare_of_a_function_and_of_a_nested_module(
    model: Any, x: Tensor, compile_it: Any
) -> None:
    layers = nn.ModuleDict({"mlp": model})

    def run(x: Tensor) -> Tensor:
        out: Tensor = layers["mlp"](x)
        return out

    names = [f"layers.mlp.{name}" for name in MOVED]
    assert compile_ext.prepare(run, x) == dict.fromkeys(names, "re-homed")
    assert compile_ext.prepare(compile_it(layers["mlp"]), x) == MOVED


def test_prepare_of_many_models(new_model: Any, x: Tensor) -> None:
    found = [compile_ext.prepare(new_model(), x) for _ in range(10)]
    assert found == [MOVED] * 10


@pytest.mark.parametrize("is_prepared", [True, False])
def test_restore_gives_plain_tensors(
    is_prepared: bool,
    model: Any,
    x: Tensor,
    tmp_path: Path,
    memory: Any,
    compile_it: Any,
    assert_same: Any,
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    if is_prepared:
        compile_ext.prepare(model, x)
    compiled = compile_it(model)
    before = assert_same(compiled, model, x)
    assert compile_ext.restore(compiled) == (4 if is_prepared else 3)
    assert compile_ext.restore(compiled) == 0
    for p in model.parameters():
        assert p.is_contiguous()
        assert memory(p)[1] == p.numel() * p.element_size()
    safetensors.save_model(model, str(tmp_path / "model"))
    assert torch.equal(assert_same(compiled, model, x), before)
    # The next call moved it again. With other strides a model may have been compiled twice.
    rows = [r for r in compile_ext.explain(model).rows if r.module == "0"]
    assert any(HOMED in r.constants for r in rows)
    for p in model.parameters():
        p.copy_(p.flip(0))
    assert_same(compiled, model, x)
