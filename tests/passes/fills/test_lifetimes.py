"""Shared buffers and constants over calls, models, threads and modes."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext import derived

SHARED = "s is not read: a shared buffer, uninitialised"
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills


class Filled(nn.Module):
    """Unread, read and overwritten at once."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        ops.copy_out(x, out)
        return fills.peeks(fills.reads(out @ self.w, torch.full((1,), 3.0)), x.new_ones(1))


def compiled(model: Any, inner: str = "eager", budget: int | None = None) -> Any:
    options = {"compile_ext.inner": inner, "compile_ext.memory_budget": budget}
    return torch.compile(model, backend="compile_ext", options=options)


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def own_constants() -> list[derived.Constants]:
    """The tables that come from no parameter and are alive."""
    gc.collect()
    found = [t for key, t in list(derived._SHARED.items()) if key[-1] == ()]
    return [t for t in found if len(t)]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_one_buffer_for_all_calls(seen: list[Tensor], inner: str) -> None:
    model = Filled()
    call = compiled(model, inner)
    for m in (5, 5, 7, 5):
        x = torch.randn(m, 8)
        got = call(x)
        torch.testing.assert_close(
            got, 3 * (x @ model.w), rtol=0, atol=0 if inner == "eager" else 1e-5
        )
    assert len({s.data_ptr() for s in seen}) == 1


def test_two_models_share_and_are_freed_in_any_order(seen: list[Tensor]) -> None:
    x = torch.randn(5, 8)
    for keep in (0, 1):
        torch._dynamo.reset()
        seen.clear()
        calls = [compiled(Filled()), compiled(Filled(), budget=2**20)]
        _ = [call(x) for call in calls]
        assert len({s.data_ptr() for s in seen}) == 1
        seen.clear()
        del calls[1 - keep]
        gc.collect()
        model = calls[0]._orig_mod
        assert torch.equal(calls[0](x), 3 * (x @ model.w))


def test_nothing_is_left_after_a_reset(seen: list[Tensor]) -> None:
    calls = [compiled(Filled()) for _ in range(2)]
    _ = [call(torch.randn(m, 8)) for call in calls for m in (1, 5, 6)]
    values = [weakref.ref(t.of(()).value) for t in own_constants()]
    assert len(values) == 2  # the buffer and the constant
    seen.clear()
    torch._dynamo.reset()
    del calls, _
    assert own_constants() == []
    assert [r() for r in values] == [None, None]


def test_threads(seen: list[Tensor]) -> None:
    model, faults = Filled(), []
    call, start = compiled(model), threading.Barrier(4)

    def work(seed: int) -> None:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
        start.wait()
        with torch.no_grad():
            for _ in range(20):
                if not torch.equal(call(x), 3 * (x @ model.w)):
                    faults.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert faults == []
    assert len(seen) == 80
    assert len({s.data_ptr() for s in seen}) == 1


def test_modes_take_turns(seen: list[Tensor]) -> None:
    """A buffer that is made under inference_mode serves a call outside of it, and the reverse."""
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    for order in itertools.permutations(modes):
        torch._dynamo.reset()
        seen.clear()
        model = Filled()
        call, x = compiled(model), torch.randn(5, 8)
        for mode in order:
            with mode():
                assert torch.equal(call(x), 3 * (x @ model.w))
        assert not any(s.is_inference() for s in seen)
        assert len({s.data_ptr() for s in seen}) == 1


def test_inside_and_outside_of_autocast(seen: list[Tensor]) -> None:
    """The graph under autocast keeps its fills, and does not disturb the other."""
    model = Filled()
    call, x = compiled(model), torch.randn(5, 8)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            want = model(x)
            assert torch.equal(call(x), want)
            assert call(x).dtype == want.dtype


def test_another_default_dtype(seen: list[Tensor]) -> None:
    def model(x: Tensor) -> Tensor:
        return fills.peeks(fills.reads(x, torch.full((1,), 0.1)), torch.ones(1))

    call, x = compiled(model), torch.ones(5, 8, dtype=torch.float64)
    try:
        for dtype in (torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert torch.equal(call(x), x * torch.full((1,), 0.1))
            assert seen[-1].dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device(seen: list[Tensor]) -> None:
    """The buffer lies where the fill would have been."""

    def model(x: Tensor) -> Tensor:
        return fills.ignores(x, torch.ones(3))

    call, x = compiled(model), torch.randn(5, 8)
    assert torch.equal(call(x), x + 1)
    with torch.device("meta"):  # one meta argument makes a result without values, in eager too
        call(x)
    assert torch.equal(call(x), x + 1)
    assert sorted(t.device.type for t in own_constants()) == ["cpu", "meta"]


def test_deep_copies(seen: list[Tensor]) -> None:
    model = Filled()
    call, x = compiled(model), torch.randn(5, 8)
    first = call(x)
    twin = copy.deepcopy(call)
    twin._orig_mod.w.mul_(2)
    assert torch.equal(twin(x), 2 * first)
    assert torch.equal(call(x), first)
    assert len({s.data_ptr() for s in seen}) == 1


def test_layers_share_one_graph(seen: list[Tensor]) -> None:
    layers = [Filled() for _ in range(4)]
    model = nn.Sequential(*layers)
    for layer in layers:
        layer.compile(backend="compile_ext", options={"compile_ext.inner": "eager"})
    x = torch.randn(5, 8)
    want = x
    for layer in layers:
        want = 3 * (want @ layer.w)
    assert torch.equal(model(x), want)
    assert len({s.data_ptr() for s in seen}) == 1
    said = {d.detail for r in compile_ext.explain(model).rows for d in r.decisions if d.fired}
    assert said == {
        "out is overwritten in full: what filled it is gone",
        "full(3.0), which it is given, is a constant",
        SHARED,
    }


def test_nobody_writes_a_constant(seen: list[Tensor]) -> None:
    """What a call returns is the caller's own."""
    model = Filled()
    call, x = compiled(model), torch.randn(5, 8)
    for _ in range(3):
        got = call(x)
        assert torch.equal(got, 3 * (x @ model.w))
        got.fill_(9.0)
    compile_ext.refresh(model)
    assert torch.equal(call(x), 3 * (x @ model.w))


def test_no_allocation_for_a_shared_buffer() -> None:
    """A call allocates what it returns, and nothing for the unread argument."""

    def model(x: Tensor) -> Tensor:
        return fills.ignores(x, x.new_ones(1000, 1000))

    call, x = compiled(model, budget=2**23), torch.randn(5, 8)
    call(x)
    with torch.profiler.profile(profile_memory=True) as profile:
        call(x)
    assert sum(e.self_cpu_memory_usage for e in profile.key_averages()) <= 5 * 8 * 4
