"""Derived constants follow their parameter, keep their address, and die with it."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_ext.derived import Constants, constants
from compile_ext.passes.derivation import Chain, Padding

HOW = Padding((0, 0, 0, 2), 0.0)


def expected(p: Tensor) -> Tensor:
    return F.pad(p.detach(), (0, 0, 0, 2))


def test_computed_once_and_then_looked_up() -> None:
    table, p = Constants(HOW), nn.Parameter(torch.randn(6, 8))
    first = table(p)
    assert torch.equal(first, expected(p))
    assert table(p) is first
    assert table.refreshes == 1


UPDATES: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "copy_": lambda p, t: p.copy_(t),
    "through a view": lambda p, t: p[2:].copy_(t[2:]),
    "detached": lambda p, t: p.detach().copy_(t),
    "data =": lambda p, t: setattr(p, "data", t.clone()),
    "in inference mode": lambda p, t: torch.inference_mode()(lambda: p.copy_(t))(),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"]
)
def test_follows_every_update_in_place(
    update: Callable[[nn.Parameter, Tensor], object], mode: type
) -> None:
    table, p = Constants(HOW), nn.Parameter(torch.randn(6, 8))
    with mode():
        value = table(p)
    address = value.data_ptr()
    with torch.no_grad():
        update(p, torch.randn(6, 8))
    with mode():
        assert torch.equal(table(p), expected(p))
        assert table(p).data_ptr() == address  # CUDA graphs hold the address
    assert table.refreshes == 2


def test_follows_the_same_data_in_other_strides() -> None:
    # What Dynamo guards of a parameter differs between versions: the table looks for itself.
    table, p = Constants(HOW), nn.Parameter(torch.randn(6, 6))
    table(p)
    p.data = p.data.t()
    assert torch.equal(table(p), expected(p))


def test_each_parameter_has_its_own() -> None:
    table = Constants(HOW)
    parameters = [nn.Parameter(torch.randn(6, 8)) for _ in range(3)]
    for p in (*parameters, *parameters):
        assert torch.equal(table(p), expected(p))
    assert table.refreshes == 3
    twin = copy.deepcopy(parameters[0])
    assert torch.equal(table(twin), expected(twin))
    assert table(twin).data_ptr() != table(parameters[0]).data_ptr()


def test_freed_with_the_parameter() -> None:
    table, p = Constants(HOW), nn.Parameter(torch.randn(6, 8))
    table(p)
    assert len(table) == 1
    del p
    gc.collect()
    assert len(table) == 0


def test_shared_by_equal_derivations_of_one_form_and_freed_with_the_last_user() -> None:
    p = nn.Parameter(torch.randn(2, 3))
    first = constants(Padding((0, 1, 0, 3), 7.0), p)
    assert constants(Padding((0, 1, 0, 3), 7.0), nn.Parameter(torch.zeros(2, 3))) is first
    assert constants(Padding((0, 1, 0, 3), 8.0), p) is not first
    for other in (p.double(), torch.randn(3, 2).t(), torch.randn(2, 4)):
        assert constants(Padding((0, 1, 0, 3), 7.0), other) is not first
    first(p)
    del first
    gc.collect()
    assert len(constants(Padding((0, 1, 0, 3), 7.0), p)) == 0  # a new table


def test_an_inference_tensor_is_computed_on_each_call() -> None:
    with torch.inference_mode():
        p = torch.randn(6, 8)
        table = Constants(HOW)
        assert torch.equal(table(p), expected(p))
        p.copy_(torch.randn(6, 8))  # leaves no trace: the tensor has no version counter
        assert torch.equal(table(p), expected(p))
    assert len(table) == 0


def test_moved_to_another_dtype() -> None:
    table, p = Constants(HOW), nn.Parameter(torch.randn(6, 8))
    table(p)
    p.data = p.data.double()
    assert table(p).dtype == torch.float64
    assert torch.equal(table(p), expected(p))


def test_threads_see_whole_values() -> None:
    table, p = Constants(HOW), nn.Parameter(torch.zeros(256, 256))
    wrong: list[float] = []

    def read() -> None:
        for _ in range(200):
            value = table(p)[:256]
            if not torch.equal(value, p.detach()):
                wrong.append(float(value.sum()))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert table.refreshes == 1


@pytest.mark.parametrize("pad", [(0, 2), (0, 0, 0, 2), (1, 2, 3, 4), (0, 2, 0, 3)], ids=str)
@pytest.mark.parametrize("permutation", [(0, 1), (1, 0)], ids=str)
def test_pad_keeps_the_memory_order(pad: tuple[int, ...], permutation: tuple[int, int]) -> None:
    x = torch.randn(6, 8).permute(permutation)
    got = Padding(pad, 1.5, keep_order=True)(x)
    assert torch.equal(got, F.pad(x, pad, value=1.5))
    assert (got.stride(0) > got.stride(1)) == (x.stride(0) > x.stride(1))


def test_pad_of_float8() -> None:
    x = torch.randn(6, 8).to(torch.float8_e4m3fn)
    got = Padding((0, 8, 0, 2), 0.0)(x)
    assert got.dtype == torch.float8_e4m3fn
    assert torch.equal(got.float(), F.pad(x.float(), (0, 8, 0, 2)))


def test_chain_applies_in_order() -> None:
    x = torch.randn(2, 3)
    got = Chain((Padding((0, 1), 1.0), Padding((0, 1), 2.0)))(x)
    assert torch.equal(got, F.pad(F.pad(x, (0, 1), value=1.0), (0, 1), value=2.0))
