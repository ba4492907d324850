"""Re-homed parameters that are written, set and swapped, and memory that a user holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_ext import homes
from compile_ext.derived import Constants
from compile_ext.passes.derivation import Padding

HOMED = "re-homed: the parameter lives in it"
OTHER = "a copy: it lives in the buffer of another padding"
SHARED = "a copy: something else uses its memory"
BYTES = 6 * 8 * 4


WRITES: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "copy_": lambda p, t: p.copy_(t),
    "data.copy_": lambda p, t: p.data.copy_(t),
    "view": lambda p, t: [row.copy_(new) for row, new in zip(p, t, strict=True)],
    "flat view": lambda p, t: p.view(-1).copy_(t.view(-1)),
    "numpy": lambda p, t: p.detach().numpy().__setitem__(slice(None), t.numpy()),
    "in inference mode": lambda p, t: torch.inference_mode()(lambda: p.copy_(t))(),
    "out=": lambda p, t: torch.add(t, 0, out=p.data),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_write_in_place_is_live(write: str, table: Any, homed: Any, assert_kept: Any) -> None:
    p, value = homed
    new = torch.randn(6, 8)
    with torch.no_grad():
        WRITES[write](p, new)
    assert torch.equal(value, F.pad(new, (0, 0, 0, 2), value=5.0))  # before anybody looks
    assert assert_kept(table, p, HOMED) is value
    assert table.refreshes == 1


def test_a_training_step_is_live(table: Any, homed: Any, assert_kept: Any) -> None:
    p, value = homed
    (p * 3).sum().backward()
    torch.optim.SGD([p], lr=0.5).step()
    assert assert_kept(table, p, HOMED) is value


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_again_after_another_dtype_and_back(
    dtype: torch.dtype, table: Any, assert_kept: Any
) -> None:
    layer = nn.Linear(8, 6, bias=False)
    for wanted in (torch.float32, dtype, torch.float32):
        layer.to(wanted)
        assert assert_kept(table, layer.weight, HOMED).dtype == wanted


def test_again_at_the_same_address_after_data_is_set(
    table: Any, homed: Any, assert_kept: Any
) -> None:
    p, value = homed
    address = value.data_ptr()
    for _ in range(3):
        p.data = torch.randn(6, 8)
        assert assert_kept(table, p, HOMED).data_ptr() == address


def test_again_after_assign_and_deepcopy(table: Any, memory: Any, assert_kept: Any) -> None:
    layer = nn.Linear(8, 6, bias=False)
    assert_kept(table, layer.weight, HOMED)
    layer.load_state_dict({"weight": torch.randn(6, 8)}, assign=True)
    value = assert_kept(table, layer.weight, HOMED)
    twin = copy.deepcopy(layer)
    assert memory(twin.weight)[1] == BYTES  # its pads stay behind
    assert memory(assert_kept(table, twin.weight, HOMED)) != memory(value)
    with torch.no_grad():
        twin.weight.zero_()
    assert assert_kept(table, layer.weight, HOMED) is value


def test_again_once_nobody_else_uses_the_memory(table: Any, assert_kept: Any) -> None:
    layer = nn.Linear(8, 6, bias=False)
    state = layer.state_dict()
    assert_kept(table, layer.weight, SHARED)
    del state
    assert_kept(table, layer.weight, SHARED)  # nothing looks while the copy is fresh
    table.invalidate(layer.weight)
    assert_kept(table, layer.weight, HOMED)


def test_what_a_user_holds_is_not_overwritten(table: Any, homed: Any, assert_kept: Any) -> None:
    p, _ = homed
    old, part, twin = p.data, p.detach()[2:], nn.Parameter(p.data)
    before = old.clone()
    for held in (old, part, twin):
        p.data = torch.randn(6, 8)
        assert_kept(table, p, HOMED)
        assert torch.equal(held, before[-len(held) :])
    p.data = torch.randn(6, 8)
    old = old.clone()  # the last two may go
    del part, twin
    assert_kept(table, p, HOMED)
    assert torch.equal(old, before)


def test_a_storage_that_a_user_holds_is_not_overwritten(
    table: Any, homed: Any, assert_kept: Any
) -> None:
    p, _ = homed
    storage, before = p.untyped_storage(), p.detach().clone()
    p.data = torch.zeros(6, 8)
    assert_kept(table, p, HOMED)
    assert torch.equal(torch.empty(0).set_(storage, 0, (6, 8), (8, 1)), before)


def test_not_while_a_user_holds_the_storage(table: Any, assert_kept: Any) -> None:
    p = nn.Parameter(torch.randn(6, 8))
    storage = p.untyped_storage()
    assert_kept(table, p, SHARED)
    assert storage.data_ptr() == p.data_ptr()


def test_data_swapped_back_and_forth(table: Any, homed: Any, assert_kept: Any) -> None:
    p, value = homed
    mine, other = p.data, torch.randn(6, 8)
    values = mine.clone(), other.clone()
    for turn in range(6):
        p.data = (other, mine)[turn % 2]
        assert_kept(table, p, (SHARED, HOMED)[turn % 2])
        assert torch.equal(mine, values[0])
        assert torch.equal(other, values[1])
    assert p.data_ptr() == value.data_ptr()


def test_two_parameters_swap_their_data(table: Any, assert_kept: Any) -> None:
    p, q = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(6, 8))
    for x in (p, q):
        assert_kept(table, x, HOMED)
    values = p.detach().clone(), q.detach().clone()
    p.data, q.data = q.data, p.data
    for _ in range(2):
        for x, want in ((p, values[1]), (q, values[0])):
            assert torch.equal(table.of([x]).value, F.pad(want, (0, 0, 0, 2), value=5.0))
            assert torch.equal(x, want)
    with torch.no_grad():
        p.zero_()
    for x in (p, q):
        assert_kept(table, x, table.of([x]).kind)
    assert torch.equal(q, values[0])


def test_two_paddings_of_one_parameter(table: Any, assert_kept: Any) -> None:
    p = nn.Parameter(torch.randn(6, 8))
    assert_kept(table, p, HOMED)
    for rows, value, kind in ((1, 5.0, HOMED), (2, 5.0, HOMED), (3, 5.0, OTHER), (2, 4.0, OTHER)):
        want = F.pad(p.detach(), (0, 0, 0, rows), value=value)
        constant: Any = Constants(Padding((0, 0, 0, rows), value)).of([p])
        assert torch.equal(constant.value, want)
        assert constant.kind == kind


def test_leave_gives_memory_of_its_own(
    table: Any, homed: Any, memory: Any, assert_kept: Any
) -> None:
    p, value = homed
    held, before = p.data, p.detach().clone()
    assert homes.leave(p)
    assert not homes.leave(p)
    assert memory(p)[1] == BYTES
    assert torch.equal(p, before)
    with torch.no_grad():
        p.zero_()
    assert torch.equal(held, before)
    assert torch.equal(value[:6], before)
    assert_kept(table, p, HOMED)


def test_the_memory_cannot_be_resized(table: Any, homed: Any, assert_kept: Any) -> None:
    # Sleep modes resize storages to nothing and back: the pads would be lost without a trace.
    p, _ = homed
    with pytest.raises(RuntimeError, match="not resizable"):
        p.untyped_storage().resize_(0)
    assert_kept(table, p, HOMED)
