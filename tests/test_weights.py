"""Weights of compiled models that change: every way of an update, prepare, restore, refresh."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library, register_fake
from torch.nn.utils import parametrize

import compile_ext
from compile_ext.layers import ChannelFp8Linear
from compile_ext.report import Row

EAGER: dict[str, Any] = {"compile_ext.inner": "eager"}
HOMED = "re-homed: the parameter lives in it"
PREPARE = "a copy: more than rows is added (compile_ext.prepare moves the parameter)"
SHARED = "a copy: something else uses its memory"


@pytest.fixture(params=[True, False], ids=["rehome", "copy"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**EAGER, "compile_ext.rehome": request.param}


def fp8_model() -> Any:
    """N is padded in the first layer (50 -> 64: re-homed), K in the second (a copy)."""
    return nn.Sequential(
        ChannelFp8Linear(torch.randn(50, 64) / 8, torch.randn(50)),
        ChannelFp8Linear(torch.randn(64, 50) / 8, torch.randn(64)),
    )


def compile_it(model: Any, options: dict[str, Any]) -> Any:
    return torch.compile(model, backend="compile_ext", options=options)


def tokens() -> Tensor:
    return torch.randn(5, 64).bfloat16()


def assert_same(compiled: Any, model: Any, x: Tensor) -> Any:
    """Bit-equal: with inner eager both run the reference op, and zeros are all that K gains."""
    got, want = compiled(x), model(x)
    assert got.shape == want.shape
    assert torch.equal(got, want)
    return got.clone()


def row_of(model: Any, module: str) -> Row:
    (row,) = (r for r in compile_ext.explain(model).rows if r.module == module)
    return row


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# ---- every way of an update ----------------------------------------------------------------------


def each(model: nn.Module, write: Callable[[nn.Parameter, Tensor], object]) -> None:
    new = fp8_model().state_dict()
    for name, p in model.named_parameters():
        write(p, new[name])


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        each(model, lambda p, t: p.copy_(t))


def new_parameters(model: nn.Module) -> None:
    for layer in model.children():
        for name, p in [*layer.named_parameters()]:
            new = torch.randn(p.shape).to(p.dtype)
            setattr(layer, name, nn.Parameter(new, requires_grad=False))


def some(model: Any) -> None:
    model[0].weight_scale.mul_(2)
    model[1].weight.copy_(model[1].weight.flip(0))


def untraced(model: nn.Module) -> None:
    each(model, lambda p, t: p.data.copy_(t))
    compile_ext.refresh(model)


def data_of_one(model: Any) -> None:
    model[0].weight.data = fp8_model()[0].weight.data


UPDATES: dict[str, Callable[[Any], object]] = {
    "copy_": lambda m: each(m, lambda p, t: p.copy_(t)),
    "a part": lambda m: each(m, lambda p, t: p[3:9].copy_(t[3:9])),
    "data.copy_ and refresh": untraced,
    "data =": lambda m: each(m, lambda p, t: setattr(p, "data", t)),
    "data = of one that is re-homed": data_of_one,
    "load_state_dict": lambda m: m.load_state_dict(fp8_model().state_dict()),
    "load_state_dict, assign": lambda m: m.load_state_dict(fp8_model().state_dict(), assign=True),
    "new parameters": new_parameters,
    "in inference mode": in_inference_mode,
    "new layers": lambda m: m.__setitem__(0, fp8_model()[0]),
    "some of the weights": some,
}


@pytest.mark.parametrize("update", UPDATES)
def test_every_update_is_seen(update: str, options: dict[str, Any]) -> None:
    model, x = fp8_model(), tokens()
    compiled = compile_it(model, options)
    before = assert_same(compiled, model, x)
    for _ in range(2):
        UPDATES[update](model)
        after = assert_same(compiled, model, x)
        assert not torch.equal(after, before)
        before = after


def test_every_update_is_seen_with_inductor() -> None:
    model, x = fp8_model(), tokens()
    compiled = compile_it(model, {})
    for update in ("none", "copy_", "data =", "load_state_dict, assign", "in inference mode"):
        UPDATES.get(update, lambda m: None)(model)
        # Inductor may fuse a multiply and an add: one ulp of the hidden bfloat16 (2^-8) can become
        # an FP8 step (2^-3 of the value) of a few of the 50 hidden elements, each |w| < 0.6.
        torch.testing.assert_close(compiled(x), model(x), rtol=2**-5, atol=0.1)
    assert row_of(model, "0").constants == (HOMED,)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_same_values_give_the_same_bits(mode: type, options: dict[str, Any]) -> None:
    model, x = fp8_model(), tokens()
    compiled = compile_it(model, options)
    with mode():
        before = assert_same(compiled, model, x)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        assert torch.equal(assert_same(compiled, model, x), before)


def test_writes_without_a_trace_are_live_in_a_re_homed_weight_and_need_refresh_in_a_copy() -> None:
    model, x = fp8_model(), tokens()
    compiled = compile_it(model, EAGER)
    before = assert_same(compiled, model, x)
    model[0].weight.data.copy_(model[0].weight.flip(0))
    assert not torch.equal(assert_same(compiled, model, x), before)
    stale = assert_same(compiled, model, x)
    model[1].weight.data.copy_(model[1].weight.flip(0))
    assert torch.equal(compiled(x), stale)
    assert compile_ext.refresh(compiled) == 4  # 0: weight, scale, bias; 1: weight
    assert_same(compiled, model, x)


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 16))
        parametrize.register_parametrization(self, "weight", Doubled())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.compile_ext_weights.gemm(x, self.weight)
        return out


class Lora(nn.Module):
    """A float weight that is padded by hand, or by the contract of the op."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.w = nn.Parameter(torch.randn(30, 16))

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            return F.linear(x, F.pad(self.w, (0, 0, 0, 2)))[:, :30]
        out: Tensor = torch.ops.compile_ext_weights.gemm(x, self.w)
        return out


_LIBRARY = Library("compile_ext_weights", "DEF")
_LIBRARY.define("gemm(Tensor x, Tensor w) -> Tensor")
_LIBRARY.impl("gemm", lambda x, w: x @ w.t(), "CompositeExplicitAutograd")
register_fake("compile_ext_weights::gemm", lambda x, w: x.new_empty(len(x), len(w)), lib=_LIBRARY)
compile_ext.register_contract(
    torch.ops.compile_ext_weights.gemm.default,
    compile_ext.OpContract(
        gemm=compile_ext.Gemm(a="x", b="w"), align={"n": compile_ext.Align(8, pad={"w": 0})}
    ),
)
# A row of the result may be summed in another order where the matrix has more columns: 16 products
# and sums of values up to 4, each rounded to 2^-24.
FLOAT: dict[str, Any] = {"rtol": 2**-20, "atol": 2**-16}


@pytest.mark.parametrize("by_hand", [True, False], ids=["F.pad", "contract"])
def test_a_lora_is_merged_and_unmerged(by_hand: bool, options: dict[str, Any]) -> None:
    model, x = Lora(by_hand), torch.randn(4, 16)
    compiled = compile_it(model, options)
    update = torch.randn(30, 2) @ torch.randn(2, 16)
    torch.testing.assert_close(compiled(x), model(x), **FLOAT)
    before = compiled(x)
    model.w.add_(update)
    torch.testing.assert_close(compiled(x), model(x), **FLOAT)
    torch.testing.assert_close(compiled(x) - before, x @ update.t(), rtol=2**-16, atol=2**-13)
    model.w.sub_(update)
    torch.testing.assert_close(compiled(x), model(x), **FLOAT)


@pytest.mark.parametrize("budget", [{}, {"compile_ext.memory_budget": 2**20}], ids=str)
def test_a_parametrized_weight(budget: dict[str, Any], options: dict[str, Any]) -> None:
    model, x = Parametrized(), torch.randn(4, 16)
    original = dict(model.named_parameters())["parametrizations.weight.original"]
    compiled = compile_it(model, {**options, **budget})
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x), **FLOAT)
        original.mul_(1.5)
    folded = [d.fired for r in compile_ext.explain(model).rows for d in r.decisions]
    assert any(folded) == bool(budget)  # the product is larger than an eighth of the weights


@pytest.mark.parametrize("what", ["model", "compiled"])
def test_a_deepcopy_is_a_model_of_its_own(what: str, options: dict[str, Any]) -> None:
    model, x = fp8_model(), tokens()
    compiled = compile_it(model, options)
    before = assert_same(compiled, model, x)
    if what == "model":
        twin = copy.deepcopy(model)
        compiled_twin = compile_it(twin, options)
    else:
        compiled_twin = copy.deepcopy(compiled)
        twin = compiled_twin._orig_mod
    assert torch.equal(assert_same(compiled_twin, twin, x), before)
    UPDATES["copy_"](twin)
    assert not torch.equal(assert_same(compiled_twin, twin, x), before)
    assert torch.equal(assert_same(compiled, model, x), before)
    UPDATES["data ="](model)
    assert_same(compiled, model, x)
    assert_same(compiled_twin, twin, x)


@pytest.mark.parametrize("float8", [True, False], ids=["torch.save", "pickle"])
def test_a_saved_model_is_a_model_of_its_own(
    float8: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    model, x = (fp8_model(), tokens()) if float8 else (Lora(False), torch.randn(4, 16))
    compiled = compile_it(model, options)
    before = compiled(x)
    if float8:  # plain pickle does not know the type
        torch.save(model, tmp_path / "model")
        twin = torch.load(tmp_path / "model", weights_only=False)
    else:
        twin = pickle.loads(pickle.dumps(model))
    assert [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]
    compiled_twin = compile_it(twin, options)
    assert torch.equal(compiled_twin(x), before)
    for p in model.parameters():
        p.copy_(p.flip(0))
    torch.testing.assert_close(compiled(x), model(x), **FLOAT)
    assert not torch.equal(compiled(x), before)
    assert torch.equal(compiled_twin(x), before)


def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 16)
            self.head = nn.Linear(16, 30, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, at: Tensor) -> Tensor:
            out: Tensor = torch.ops.compile_ext_weights.gemm(self.embedding(at), self.head.weight)
            return out

    model, at = Tied(), torch.tensor([0, 7, 29])
    compiled = compile_it(model, EAGER)
    for _ in range(3):
        torch.testing.assert_close(compiled(at), model(at), **FLOAT)
        model.embedding.weight.data.mul_(1.5)  # re-homed: no refresh
    assert model.head.weight is model.embedding.weight


# ---- refresh -------------------------------------------------------------------------------------


def test_refresh_returns_how_many_constants_there_were() -> None:
    model, other, x = fp8_model(), fp8_model(), tokens()
    assert compile_ext.refresh(model) == 0  # not compiled
    compiled = compile_it(model, EAGER)
    compiled(x)
    for target in (model, compiled, compiled.forward):
        assert compile_ext.refresh(target) == 4
    assert compile_ext.refresh(model[0]) == 3
    assert compile_ext.refresh(other) == 0


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat([self.q, self.k]))


FOLD_ALL: dict[str, Any] = {**EAGER, "compile_ext.memory_budget": 2**20}


def test_refresh_of_a_constant_with_two_sources() -> None:
    model, x = Fused(), torch.randn(5, 4)
    compiled = compile_it(model, FOLD_ALL)
    assert_same(compiled, model, x)
    for p in model.parameters():
        p.data.mul_(2)
    compile_ext.refresh(model)
    assert_same(compiled, model, x)


def test_refresh_counts_a_constant_with_two_sources_once() -> None:
    model = Fused()
    compile_it(model, FOLD_ALL)(torch.randn(5, 4))
    assert compile_ext.refresh(model) == 1


def test_refresh_moves_a_weight_that_nobody_else_uses_any_more() -> None:
    model, x = fp8_model(), tokens()
    state = model.state_dict()
    compiled = compile_it(model, EAGER)
    assert_same(compiled, model, x)
    assert row_of(model, "0").constants == (SHARED,)
    model[0].weight.copy_(model[0].weight.flip(0))
    assert_same(compiled, model, x)
    del state
    compile_ext.refresh(model)
    assert row_of(model, "0").constants == (HOMED,)
    assert_same(compiled, model, x)


# ---- prepare and restore -------------------------------------------------------------------------


def memory(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()


MOVED = {"0": "re-homed", "0.weight_scale": "re-homed", "0.bias": "re-homed", "1": "re-homed"}


def test_prepare_moves_what_is_padded() -> None:
    model, x = fp8_model(), tokens()
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
    compiled = compile_it(model, EAGER)
    assert torch.equal(assert_same(compiled, model, x), want)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert row_of(model, "1").constants == (HOMED,)


def test_a_prepared_weight_takes_writes_without_a_trace() -> None:
    model, x = fp8_model(), tokens()
    compile_ext.prepare(model, x)
    compiled = compile_it(model, EAGER)
    before = assert_same(compiled, model, x)
    each(model, lambda p, t: p.data.copy_(t))
    assert not torch.equal(assert_same(compiled, model, x), before)


@pytest.mark.parametrize("update", UPDATES)
def test_every_update_of_a_prepared_model_is_seen(update: str) -> None:
    model, x = fp8_model(), tokens()
    compile_ext.prepare(model, x)
    compiled = compile_it(model, EAGER)
    before = assert_same(compiled, model, x)
    for _ in range(2):
        UPDATES[update](model)
        after = assert_same(compiled, model, x)
        assert not torch.equal(after, before)
        before = after
        twin = copy.deepcopy(model)
        assert twin[1].weight.stride() == (50, 1)
        assert torch.equal(assert_same(compile_it(twin, EAGER), twin, x), after)


def test_prepare_of_a_model_that_runs_under_inductor() -> None:
    model, x = fp8_model(), tokens()
    compile_ext.prepare(model, x)
    compiled = compile_it(model, {})
    for _ in range(2):
        # As in test_every_update_is_seen_with_inductor.
        torch.testing.assert_close(compiled(x), model(x), rtol=2**-5, atol=0.1)
        each(model, lambda p, t: p.data.copy_(t))
    assert row_of(model, "1").constants == (HOMED,)


class Gemm(nn.Module):
    """``change`` of a parameter goes into a GEMM that wants N in multiples of 8."""

    def __init__(self, change: Callable[[Tensor], Tensor], weight: Tensor) -> None:
        super().__init__()
        self.change, self.w = change, nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.compile_ext_weights.gemm(x, self.change(self.w))
        return out


def same(w: Tensor) -> Tensor:
    return w


STAY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor], str]] = {
    "part": (same, lambda: torch.randn(60, 16)[:30], "it is a part of a larger tensor"),
    "numpy": (
        same,
        lambda: torch.from_numpy(torch.randn(30, 16).numpy().copy()),
        "its memory belongs to another library or to a file",
    ),
    "slice": (
        lambda w: w[2:],
        lambda: torch.randn(32, 16),
        "it is computed (getitem then pad([0, 0, 0, 2], 0))",
    ),
    "front": (
        lambda w: F.pad(w, (0, 0, 2, 0)),
        lambda: torch.randn(30, 16),
        "it is padded in front",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_prepare_says_what_stays(name: str) -> None:
    change, weight, reason = STAY[name]
    model, x = Gemm(change, weight()), torch.randn(4, 16)
    address = model.w.data_ptr()
    assert compile_ext.prepare(model, x) == {"w": reason}
    assert model.w.data_ptr() == address
    torch.testing.assert_close(compile_it(model, EAGER)(x), model(x), **FLOAT)


def test_prepare_leaves_a_weight_that_is_in_use_and_one_that_fits() -> None:
    model, x = fp8_model(), tokens()
    held = model[1].weight.detach()
    found = compile_ext.prepare(model, x)
    assert found == {**MOVED, "1": "something else uses its memory"}
    assert held.data_ptr() == model[1].weight.data_ptr()
    assert compile_ext.prepare(Gemm(same, torch.randn(32, 16)), torch.randn(4, 16)) == {}


def test_prepare_of_a_function_and_of_a_nested_module() -> None:
    layers, x = nn.ModuleDict({"mlp": fp8_model()}), tokens()

    def run(x: Tensor) -> Tensor:
        out: Tensor = layers["mlp"](x)
        return out

    names = [f"layers.mlp.{name}" for name in MOVED]
    assert compile_ext.prepare(run, x) == dict.fromkeys(names, "re-homed")
    assert compile_ext.prepare(compile_it(layers["mlp"], EAGER), x) == MOVED


def test_prepare_of_many_models() -> None:
    x = tokens()
    found = [compile_ext.prepare(fp8_model(), x) for _ in range(10)]
    assert found == [MOVED] * 10


@pytest.mark.parametrize("is_prepared", [True, False])
def test_restore_gives_plain_tensors(is_prepared: bool, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, x = fp8_model(), tokens()
    if is_prepared:
        compile_ext.prepare(model, x)
    compiled = compile_it(model, EAGER)
    before = assert_same(compiled, model, x)
    assert compile_ext.restore(compiled) == (4 if is_prepared else 3)
    assert compile_ext.restore(compiled) == 0
    for p in model.parameters():
        assert p.is_contiguous()
        assert memory(p)[1] == p.numel() * p.element_size()
    safetensors.save_model(model, str(tmp_path / "model"))
    assert torch.equal(assert_same(compiled, model, x), before)
    assert HOMED in row_of_last(model, "0").constants  # the next call moved it again
    UPDATES["copy_"](model)
    assert_same(compiled, model, x)


def row_of_last(model: Any, module: str) -> Row:
    """With other strides a model may have been compiled twice."""
    return next(r for r in compile_ext.explain(model).rows if r.module == module)


# ---- options -------------------------------------------------------------------------------------


def test_rehome_false_leaves_every_weight_where_it_is() -> None:
    model, x = fp8_model(), tokens()
    before = [memory(p) for p in model.parameters()]
    compiled = compile_it(model, {**EAGER, "compile_ext.rehome": False})
    assert_same(compiled, model, x)
    compile_ext.refresh(model)
    assert compile_ext.restore(model) == 0
    assert [memory(p) for p in model.parameters()] == before
    assert row_of(model, "0").constants == ("a copy: compile_ext.rehome is False",)
    assert row_of(model, "1").constants == (PREPARE,)


def test_explain_says_how_each_constant_is_kept() -> None:
    model, x = fp8_model(), tokens()
    compiled = compile_it(model, EAGER)
    assert_same(compiled, model, x)
    assert row_of(model, "0").constants == (HOMED,)
    assert row_of(model, "1").constants == (PREPARE,)
    assert f"weight: {HOMED}" in str(compile_ext.explain(compiled))
    fused = Fused()
    compile_it(fused, FOLD_ALL)(torch.randn(5, 4))
    assert row_of(fused, "q").constants == ("a copy: it is computed",)


FOLDS = {"0": "N 50 -> 64: b, bias, scale_b padded", "1": "K 50 -> 64: a, b padded"}


def too_large(cost: int, left: int, limit: int) -> str:
    left_text = f"it would take {cost} bytes, and {left} of {limit} are left"
    return f"{left_text} (compile_ext.memory_budget)"


# Bytes of layer 0: 64 rows of 64 FP8, of one float32 scale and of one float32 bias; re-homed, the
# 14 new rows of each alone. Of layer 1: 64 rows of 64 FP8.
ALL, NEW, COPY = 64 * (64 + 4 + 4), 14 * (64 + 4 + 4), 64 * 64


@pytest.mark.parametrize(
    ("budget", "rehome", "want"),
    [
        (None, True, FOLDS),
        (None, False, FOLDS),  # padding has no limit of its own
        (NEW + COPY, True, FOLDS),
        (NEW + COPY - 1, True, {**FOLDS, "1": too_large(COPY, COPY - 1, NEW + COPY - 1)}),
        (ALL + COPY, False, FOLDS),
        (COPY, False, {**FOLDS, "0": too_large(ALL, COPY, COPY)}),
        (NEW - 1, True, {"0": too_large(NEW, NEW - 1, NEW - 1), "1": too_large(COPY, 1007, 1007)}),
        (0, False, {"0": too_large(ALL, 0, 0), "1": too_large(COPY, 0, 0)}),
    ],
)
def test_memory_budget(budget: int | None, rehome: bool, want: dict[str, str]) -> None:
    model, x = fp8_model(), tokens()
    options = {**EAGER, "compile_ext.rehome": rehome, "compile_ext.memory_budget": budget}
    compiled = compile_it(model, options)
    assert_same(compiled, model, x)
    found = {r.module: r.decisions[0] for r in compile_ext.explain(model).rows}
    assert {name: d.detail for name, d in found.items()} == want
    assert {name: d.fired for name, d in found.items()} == {n: want[n] == FOLDS[n] for n in want}


@pytest.mark.parametrize(("columns", "limit"), [(240, 1024), (239, 1020)])
def test_the_default_budget_is_an_eighth_of_the_weights(columns: int, limit: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(32, 8).bfloat16())  # 512 bytes, 1024 as float32
            self.rest = nn.Parameter(torch.randn(8, columns))  # 32 bytes a column

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.linear(x, self.w.float()), x @ self.rest

    model = Model()
    compile_it(model, EAGER)(torch.randn(3, 8))
    (decision,) = row_of(model, "w").decisions
    assert decision.fired == (limit >= 1024)
    assert decision.fired or decision.detail == too_large(1024, limit, limit)


def test_memory_budget_holds_for_weights_that_cannot_move() -> None:
    model, x = fp8_model(), tokens()
    state = model.state_dict()
    compile_it(model, {**EAGER, "compile_ext.memory_budget": NEW})(x)
    assert state["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert row_of(model, "0").constants == ()  # 4608 bytes of copies against a budget of 1008
