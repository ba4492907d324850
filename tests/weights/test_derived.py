"""Derived constants follow their parameters, keep their address, and die with them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_ext.derived import Constants, Stamp, constants, refresh
from compile_ext.passes.derivation import Padding

HOW = Padding((0, 0, 0, 2), 0.0)
HOMED = "re-homed: the parameter lives in it"


@pytest.fixture(params=[True, False], ids=["rehome", "copy"])
def rehome(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def expected(p: Tensor) -> Tensor:
    return F.pad(p.detach(), (0, 0, 0, 2))


def value_of(table: Constants, *sources: Tensor) -> Tensor:
    value = table.of(sources).value
    assert value is not None
    return value


def test_computed_once_and_then_looked_up(rehome: bool) -> None:
    table, p = Constants(HOW, rehome), nn.Parameter(torch.randn(6, 8))
    want = expected(p)
    first = value_of(table, p)
    assert torch.equal(first, want)
    assert torch.equal(p, want[:6])
    assert value_of(table, p) is first
    assert table.refreshes == 1
    assert table.of([p]).kind == (HOMED if rehome else "a copy: compile_ext.rehome is False")


UPDATES: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "copy_": lambda p, t: p.copy_(t),
    "through a view": lambda p, t: p[2:].copy_(t[2:]),
    "detached": lambda p, t: p.detach().copy_(t),
    "data =": lambda p, t: setattr(p, "data", t.clone()),
    "in inference mode": lambda p, t: torch.inference_mode()(lambda: p.copy_(t))(),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"]
)
def test_follows_every_update_in_place(update: str, mode: type, rehome: bool) -> None:
    table, p = Constants(HOW, rehome), nn.Parameter(torch.randn(6, 8))
    with mode():
        address = value_of(table, p).data_ptr()
    before, new = p.detach().clone(), torch.randn(6, 8)
    with torch.no_grad():
        UPDATES[update](p, new)
    assert not torch.equal(p, before)
    with mode():
        for _ in range(2):
            assert torch.equal(value_of(table, p), expected(p))
            assert value_of(table, p).data_ptr() == address  # CUDA graphs hold the address
    # A write into a re-homed parameter is a write into the constant.
    assert table.refreshes == (1 if rehome and update != "data =" else 2)


def test_follows_a_fused_optimizer(rehome: bool) -> None:
    # It moves no version counter.
    p = nn.Parameter(torch.randn(6, 8))
    table = constants(HOW, [p], rehome)
    optimizer = torch.optim.SGD([p], lr=0.5, fused=True)
    value_of(table, p)
    p.grad = torch.ones(6, 8)
    version, before = p._version, p.detach().clone()
    optimizer.step()
    assert p._version == version
    assert torch.equal(p, before - 0.5)
    assert torch.equal(value_of(table, p), expected(p))


def test_follows_the_same_data_in_other_strides(rehome: bool) -> None:
    # What Dynamo guards of a parameter differs between versions: the table looks for itself.
    table, p = Constants(HOW, rehome), nn.Parameter(torch.randn(6, 6))
    value_of(table, p)
    p.data = p.data.t()
    assert torch.equal(value_of(table, p), expected(p))
    p.data = p.data.t()
    assert torch.equal(value_of(table, p), expected(p))


def test_follows_data_that_lands_on_the_freed_address(rehome: bool) -> None:
    memory = bytearray(6 * 8 * 4)

    def at_that_address(value: float) -> Tensor:
        memory[:] = torch.full((48,), value).numpy().tobytes()
        return torch.frombuffer(memory, dtype=torch.float32).view(6, 8)

    table, p = Constants(HOW, rehome), nn.Parameter(torch.zeros(6, 8))
    p.data = at_that_address(1.0)
    assert torch.equal(value_of(table, p), expected(p))
    seen = p.data_ptr(), p._version
    p.data = torch.zeros(6, 8)  # nothing looks at it
    p.data = at_that_address(2.0)
    assert (p.data_ptr(), p._version) == seen
    assert torch.equal(value_of(table, p), expected(p))
    assert table.refreshes == 2


def test_follows_data_that_is_set_over_and_over(rehome: bool) -> None:
    table, p = Constants(HOW, rehome), nn.Parameter(torch.randn(6, 8))
    for _ in range(30):
        p.data = torch.randn(6, 8)
        p.data = torch.randn(6, 8)  # the allocator likes to hand out an address again
        want = expected(p)
        assert torch.equal(value_of(table, p), want)
        assert torch.equal(p, want[:6])


def test_stamp_goes_stale_with_its_storage() -> None:
    x = torch.randn(6, 8)
    stamp, home = Stamp(x, is_home=False), Stamp(x, is_home=True)
    x.add_(1)
    assert not stamp.fits(x)
    assert home.fits(x)  # its memory is the constant's: writes need not be seen
    stamp = Stamp(x, is_home=False)
    assert stamp.fits(x)
    assert not stamp.fits(x.view(8, 6))
    pointer = stamp.pointer
    del x
    gc.collect()
    assert stamp.pointer != pointer


def test_each_parameter_has_its_own(rehome: bool) -> None:
    table = Constants(HOW, rehome)
    parameters = [nn.Parameter(torch.randn(6, 8)) for _ in range(3)]
    for p in (*parameters, *parameters):
        assert torch.equal(value_of(table, p), expected(p))
    assert table.refreshes == 3
    twin = copy.deepcopy(parameters[0])
    assert torch.equal(value_of(table, twin), expected(twin))
    assert value_of(table, twin).data_ptr() != value_of(table, parameters[0]).data_ptr()


def test_freed_with_the_parameter(rehome: bool) -> None:
    table, p = Constants(HOW, rehome), nn.Parameter(torch.randn(6, 8))
    buffer = weakref.ref(value_of(table, p))
    assert len(table) == 1
    del p
    gc.collect()
    assert len(table) == 0
    assert buffer() is None


def test_freed_with_any_of_its_parameters(derive: Any) -> None:
    table = Constants(derive(lambda q, k: torch.cat([q, k])))
    q, k = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))
    buffer = weakref.ref(value_of(table, q, k))
    del k
    gc.collect()
    assert (len(table), buffer()) == (0, None)
    assert q.shape == (3, 4)


def test_shared_by_equal_derivations_of_one_form_and_freed_with_the_last_user() -> None:
    p = nn.Parameter(torch.randn(2, 3))
    first = constants(Padding((0, 1, 0, 3), 7.0), [p])
    assert constants(Padding((0, 1, 0, 3), 7.0), [nn.Parameter(torch.zeros(2, 3))]) is first
    assert constants(Padding((0, 1, 0, 3), 8.0), [p]) is not first
    assert constants(Padding((0, 1, 0, 3), 7.0), [p], rehome=False) is not first
    for other in (p.double(), torch.randn(3, 2).t(), torch.randn(2, 4)):
        assert constants(Padding((0, 1, 0, 3), 7.0), [other]) is not first
    value_of(first, p)
    del first
    gc.collect()
    assert len(constants(Padding((0, 1, 0, 3), 7.0), [p])) == 0  # a new table


def test_an_inference_tensor_is_computed_on_each_call(rehome: bool) -> None:
    with torch.inference_mode():
        p = torch.randn(6, 8)
        table = Constants(HOW, rehome)
        assert torch.equal(value_of(table, p), expected(p))
        p.copy_(torch.randn(6, 8))  # leaves no trace: the tensor has no version counter
        assert torch.equal(value_of(table, p), expected(p))
        kind = table.of([p]).kind
    assert kind == "computed on each call: an inference tensor has no version counter"
    assert len(table) == 0


def test_moved_to_another_dtype(rehome: bool) -> None:
    table, p = Constants(HOW, rehome), nn.Parameter(torch.randn(6, 8))
    value_of(table, p)
    p.data = p.data.double()
    assert value_of(table, p).dtype == torch.float64
    assert torch.equal(value_of(table, p), expected(p))


def test_threads_see_whole_values(rehome: bool, in_four_threads: Any) -> None:
    table, p = Constants(HOW, rehome), nn.Parameter(torch.zeros(256, 256))
    wrong: list[float] = []

    def read() -> None:
        for _ in range(200):
            value = value_of(table, p)[:256]
            if not torch.equal(value, p.detach()):
                wrong.append(float(value.sum()))

    in_four_threads(read)
    assert wrong == []
    assert table.refreshes == 1


def test_several_sources_are_all_followed(derive: Any) -> None:
    table = Constants(derive(lambda q, k: torch.cat([q, k])))
    q, k = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))
    address = value_of(table, q, k).data_ptr()
    assert table.of([q, k]).kind == "a copy: it is computed"
    for count, source in enumerate((q, k, k, q), start=2):
        with torch.no_grad():
            source.mul_(3)
        assert torch.equal(value_of(table, q, k), torch.cat([q, k]))
        assert table.refreshes == count
    q.data, k.data = torch.randn(3, 4), torch.randn(2, 4)
    assert torch.equal(value_of(table, q, k), torch.cat([q, k]))
    assert value_of(table, q, k).data_ptr() == address
    assert not value_of(table, q, k).requires_grad


def test_the_order_of_sources_matters(derive: Any) -> None:
    table = Constants(derive(lambda a, b: a - b))
    p, q = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    assert torch.equal(value_of(table, p, q), p - q)
    assert torch.equal(value_of(table, q, p), q - p)
    assert len(table) == 2


NO_OPS: dict[str, Callable[[Any], Tensor]] = {
    "cast": lambda w: w.float(),
    "contiguous": lambda w: w.contiguous(),
    "cast of a part": lambda w: w[2:].to(torch.float32),
}


@pytest.mark.parametrize("function", NO_OPS.values(), ids=NO_OPS)
def test_a_program_that_does_nothing_leaves_its_source_alone(
    function: Callable[[Any], Tensor], derive: Any
) -> None:
    table, p = Constants(derive(function)), nn.Parameter(torch.randn(6, 8))
    first = value_of(table, p)
    assert first.untyped_storage().data_ptr() != p.untyped_storage().data_ptr()
    old, new = p.data, torch.randn(6, 8)
    before = old.clone()
    p.data = new
    assert torch.equal(value_of(table, p), function(new))
    assert torch.equal(old, before)
    assert value_of(table, p) is first


@pytest.mark.parametrize("several", [False, True], ids=["one source", "two sources"])
def test_refresh_of_writes_without_a_trace(several: bool, derive: Any) -> None:
    p, q = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(6, 8))
    how = derive(lambda a, b: torch.cat([a, b])) if several else HOW
    sources = [p, q] if several else [p]
    table = constants(how, sources, rehome=False)
    stale = value_of(table, *sources).clone()
    p.data.copy_(torch.randn(6, 8))
    assert torch.equal(value_of(table, *sources), stale)  # what refresh is for
    assert refresh([p]) == 1
    want = torch.cat([p, q]) if several else expected(p)
    assert torch.equal(value_of(table, *sources), want)


def test_pads_with_zeros_of_two_signs_are_not_equal() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    for zero in (0.0, -0.0):
        table = constants(Padding((0, 0, 0, 1), zero), [p])
        assert value_of(table, p)[2].signbit().tolist() == [str(zero) == "-0.0"] * 2
