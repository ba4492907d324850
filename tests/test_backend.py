"""The backend as users meet it: torch.compile's arguments, several graphs and models, training,
logs.
"""

from __future__ import annotations

import gc
import logging
import os
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compile_ext
from compile_ext import check as check_module
from compile_ext import records
from compile_ext.backend import compile_ext_backend
from compile_ext.derived import constants
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops.errors import CheckError
from compile_ext.passes import PASS_NAMES
from compile_ext.passes.derivation import Padding

EAGER: dict[str, Any] = {"compile_ext.inner": "eager"}
# One rounding to bfloat16 (2^-9) of values up to 4, and one FP8 step (2^-4) of a few of 64 inputs
# behind it.
CLOSE: dict[str, Any] = {"rtol": 2.0**-5, "atol": 0.05}


class Block(nn.Module):
    """A GEMM that needs padding (N = 50) and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = ChannelFp8Linear(torch.randn(50, 64) / 8)
        self.gate = nn.Linear(64, 8, bias=False).bfloat16()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.proj(x), F.linear(x, self.gate.weight).float().softmax(-1)


# What N = 50 -> 64 makes of the weight of Block.proj.
PADDING = Padding((0, 0, 0, 14), 0, keep_order=True)


def tokens(m: int) -> Tensor:
    return torch.randn(m, 64).bfloat16()


def check(compiled: Any, model: Any, x: Tensor) -> None:
    with torch.no_grad():
        for got, want in zip(compiled(x), model(x), strict=True):
            assert got.dtype == want.dtype
            assert got.stride() == want.stride()
            torch.testing.assert_close(got, want, **CLOSE)


def fired(model: Any) -> set[str]:
    return {
        d.pass_name for row in compile_ext.explain(model).rows for d in row.decisions if d.fired
    }


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"mode": "default"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"fullgraph": True, "dynamic": True},
        {"dynamic": False},
        {"options": {"compile_ext.mode": "default", "epilogue_fusion": False}},
        {"options": {"compile_ext.inner": "aot_eager"}},
        {"options": EAGER},
    ],
    ids=str,
)
def test_arguments_of_torch_compile(arguments: dict[str, Any]) -> None:
    model = Block()
    compiled = torch.compile(model, backend="compile_ext", **arguments)
    for m in (5, 1, 7):
        check(compiled, model, tokens(m))
    assert fired(compiled) == {"fold_weight_padding", "lower_router_linear", "specialize_m1"}


def test_reduce_overhead_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx as module

    torch._dynamo.reset()
    seen = []
    real = module.compile_fx
    monkeypatch.setattr(
        module, "compile_fx", lambda *a, **k: seen.append(k.get("config_patches")) or real(*a, **k)
    )
    model = Block()
    check(torch.compile(model, backend="compile_ext", mode="reduce-overhead"), model, tokens(3))
    assert seen[0] == {"triton.cudagraphs": True}


def test_graph_of_dynamo_is_not_changed_and_may_come_twice() -> None:
    model, x, seen = Block(), tokens(5), []

    def twice(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        before = gm.print_readable(print_output=False)
        first = compile_ext_backend(gm, inputs, options=EAGER)
        second = compile_ext_backend(gm, inputs, options=EAGER)
        assert gm.print_readable(print_output=False) == before
        seen.append((first, second))
        return second

    check(torch.compile(model, backend=twice), model, x)
    assert len(seen) == 1


def test_two_models_and_two_instances_do_not_mix() -> None:
    models = [Block(), Block(), nn.Sequential(Block())]
    compiled = [torch.compile(m, backend="compile_ext", options=EAGER) for m in models[:2]]
    x = tokens(5)
    for _ in range(2):
        for c, m in zip(compiled, models, strict=False):
            check(c, m, x)
    assert [r.module for r in compile_ext.explain(models[0]).rows] == ["gate", "proj"]
    with pytest.raises(compile_ext.CompileExtError, match="no live compilation"):
        compile_ext.explain(models[2][0].gate)  # never compiled
    with torch.no_grad():
        models[1].proj.weight_scale.mul_(3)
    check(compiled[1], models[1], x)
    check(compiled[0], models[0], x)


def test_steady_state_computes_nothing() -> None:
    models = [Block() for _ in range(4)]
    for m in models:
        m.compile(backend="compile_ext", options=EAGER)
    x = tokens(5)
    table = constants(PADDING, [Block().proj.weight])
    before = table.refreshes  # of all models of this process
    with torch.no_grad():
        for m in models:
            m(x)
        after_first = table.refreshes
        assert after_first - before == 4
        for _ in range(5):
            for m in models:
                m(x)
    assert table.refreshes == after_first


def test_collected_models_leave_nothing() -> None:

    def run() -> list[weakref.ref[Any]]:
        model = Block()
        compiled = torch.compile(
            model, backend="compile_ext", options={**EAGER, "compile_ext.check": True}
        )
        check(compiled, model, tokens(5))
        return [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]

    table = constants(PADDING, [Block().proj.weight])
    before, refreshes = set(records.live()), table.refreshes
    refs = run()
    torch._dynamo.reset()
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)
    assert table.refreshes == refreshes + 1
    assert len(table) == 0
    assert set(records.live()) <= before


def test_graph_break_makes_two_graphs_and_is_reported() -> None:

    class Broken(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.proj(x)
            torch._dynamo.graph_break()
            return y, F.linear(x, self.gate.weight).float().softmax(-1)

    model = Broken()
    compiled = torch.compile(model, backend="compile_ext", options=EAGER)
    check(compiled, model, tokens(5))
    report = compile_ext.explain(compiled)
    assert report.graphs == 2
    assert [f.kind for f in report.fallbacks] == ["graph break"]
    assert "in forward" in report.fallbacks[0].where
    assert {r.module for r in report.rows} == {"proj", "gate"}


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.pad(self.w, (0, 0, 0, 2))).pow(2).sum()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_training_graph_trains(inner: str) -> None:
    model, twin, x = Trained(), Trained(), torch.randn(5, 8)
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": inner})
    compiled(x).backward()
    twin(x).backward()
    # float32 defaults: one sum in another order.
    torch.testing.assert_close(model.w.grad, twin.w.grad)
    (row,) = compile_ext.explain(model).rows
    assert [(d.fired, d.detail) for d in row.decisions] == [(False, "it needs a gradient")]


def test_trained_then_served() -> None:
    model, x = Trained(), torch.randn(5, 8)
    compiled = torch.compile(model, backend="compile_ext", options=EAGER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        compiled(x).backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))


def test_every_graph_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = Block()
    with caplog.at_level(logging.DEBUG, logger="compile_ext"):
        check(torch.compile(model, backend="compile_ext", options=EAGER), model, tokens(5))
    names = [
        r.getMessage().split("\n")[0] for r in caplog.records if r.name.startswith("compile_ext")
    ]
    assert names == ["compile_ext_before_passes"] + [
        f"compile_ext_after_{name}" for name in PASS_NAMES
    ]
    assert "compile_ext::router_gemm" in caplog.text


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each comparison that compile_ext.check makes."""
    made: list[Any] = []
    real = check_module.compare

    def compare(*args: Any) -> None:
        made.append(args)
        real(*args)

    monkeypatch.setattr(check_module, "compare", compare)
    return made


def test_check_passes_for_right_rewrites_and_runs_once(comparisons: list[Any]) -> None:
    model = Block()
    compiled = torch.compile(
        model, backend="compile_ext", options={**EAGER, "compile_ext.check": True}
    )
    check(compiled, model, tokens(5))
    check(compiled, model, tokens(5))
    assert len(comparisons) == 1


def test_check_names_the_first_site_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(
        BlockFp8Linear(torch.randn(64, 64)), ChannelFp8Linear(torch.randn(50, 64))
    )

    def twice(self: Padding, x: Tensor) -> Tensor:
        padded = F.pad(x.detach(), self.pad, value=self.value)
        return padded * 2 if x.dtype == torch.float32 else padded

    monkeypatch.setattr(Padding, "__call__", twice)
    # Re-homed, the weight itself would be what the broken pad gives.
    options = {**EAGER, "compile_ext.check": True, "compile_ext.rehome": False}
    compiled = torch.compile(model, backend="compile_ext", options=options)
    with torch.no_grad(), pytest.raises(CheckError) as error:
        compiled(tokens(5))
    assert error.value.where == "compile_ext.check: compile_ext::scaled_mm in 1"


def test_check_leaves_state_and_random_numbers_alone(comparisons: list[Any]) -> None:

    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            return super().forward(F.dropout(x, 0.5, True))

    model, twin = Counts(), Counts()
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(
        model, backend="compile_ext", options={**EAGER, "compile_ext.check": True}
    )
    x = tokens(5)
    with torch.no_grad():
        torch.manual_seed(3)
        got = compiled(x)
        torch.manual_seed(3)
        want = twin(x)
    assert len(comparisons) == 1
    assert model.calls == 1
    torch.testing.assert_close(got[0], want[0], **CLOSE)


def test_caches_warm_and_cold_give_the_same(tmp_path: Any) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    x = tokens(5)
    with fresh_cache():
        for run in range(2):
            torch._dynamo.reset()
            counters.clear()
            model = Block()  # other weights each time, same graph
            compiled = torch.compile(model, backend="compile_ext")
            check(compiled, model, x)
            assert fired(compiled) == {"fold_weight_padding", "lower_router_linear"}
            hit = counters["aot_autograd"]["autograd_cache_hit"]
            assert hit == run  # cold, then warm


def test_meta_model_with_inner_eager() -> None:
    with torch.device("meta"):
        model, x = Block(), torch.empty(5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        out = torch.compile(model, backend="compile_ext", options=EAGER)(x)
    assert out[0].shape == (5, 50)
    assert {r.site.n for r in compile_ext.explain(model).rows if r.site} == {64, 8}


@pytest.mark.parametrize("given", [None, "/somewhere"])
def test_inductor_moves_no_cache_of_triton(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names a folder of its own, for each device, where none is named yet."""
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", given or "")
    if given is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    wanted = str(knobs.cache.dir)
    torch.compile(torch.sin, backend="compile_ext")(torch.ones(2))
    assert os.environ["TRITON_CACHE_DIR"] == wanted == str(knobs.cache.dir)
    assert wanted == given or given is None
