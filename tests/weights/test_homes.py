"""Re-homing: what moves into its padded buffer and what stays, and that no user loses anything."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_ext import homes
from compile_ext.derived import Constants
from compile_ext.passes.derivation import Padding

HOW = Padding((0, 0, 0, 2), 5.0)  # [6, 8] -> [8, 8]
HOMED = "re-homed: the parameter lives in it"
PART = "a copy: it is a part of a larger tensor"
OTHER = "a copy: it lives in the buffer of another padding"
SHARED = "a copy: something else uses its memory"
FOREIGN = "a copy: its memory belongs to another library or to a file"
PREPARE = "a copy: more than rows is added (compile_ext.prepare moves the parameter)"
BYTES = 6 * 8 * 4


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 8))


def expected(p: Tensor) -> Tensor:
    return F.pad(p.detach(), (0, 0, 0, 2), value=5.0)


def memory(x: Tensor) -> tuple[int, int]:
    return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()


def value_of(table: Constants, p: Tensor) -> Tensor:
    value = table.of([p]).value
    assert value is not None
    return value


def assert_kept(table: Constants, p: Tensor, kind: str) -> Tensor:
    """The constant of p is right, kept in the way that ``kind`` says, and p itself unchanged."""
    want, size = expected(p), p.shape
    constant = table.of([p])
    assert constant.value is not None
    assert torch.equal(constant.value, want)
    assert constant.kind == kind
    assert p.shape == size
    assert torch.equal(p, want[: len(p)])
    assert (p.data_ptr() == constant.value.data_ptr()) == (kind == HOMED)
    if kind == HOMED:  # what saves or copies storages does not see the pad
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
    return constant.value


def homed() -> tuple[Constants, nn.Parameter, Tensor]:
    table, p = Constants(HOW), parameter()
    return table, p, assert_kept(table, p, HOMED)


Case = tuple[Tensor, Any]  # a tensor, and what is alive beside it


def with_user(use: Callable[[nn.Parameter], Any]) -> Case:
    p = parameter()
    return p, use(p)


def in_flat_memory(size: int) -> Case:
    """As FSDP and vector_to_parameters make them."""
    p, flat = parameter(), torch.randn(size)
    p.data = flat[size - 48 :].view(6, 8)
    return p, flat


def array() -> Any:
    return torch.randn(6, 8).numpy().copy()


CASES: dict[str, tuple[Callable[[], Case], str]] = {
    "a parameter": (lambda: (parameter(), None), HOMED),
    "a buffer": (lambda: (torch.randn(6, 8), None), HOMED),
    "an alias that is gone": (lambda: with_user(lambda p: p.detach().sum()), HOMED),
    "a view": (lambda: (torch.randn(12, 8)[:6], None), "a copy: it is a view"),
    "a view of all": (lambda: (torch.randn(48).view(6, 8), None), "a copy: it is a view"),
    "inside a fused weight": (lambda: (nn.Parameter(torch.randn(18, 8)[6:12]), None), PART),
    "begin of a fused weight": (lambda: (nn.Parameter(torch.randn(18, 8)[:6]), None), PART),
    "a part of flat memory": (lambda: in_flat_memory(96), PART),
    "all of flat memory": (lambda: in_flat_memory(48), SHARED),
    "another parameter": (lambda: with_user(lambda p: nn.Parameter(p.data)), SHARED),
    "a detached alias": (lambda: with_user(lambda p: p.detach()), SHARED),
    "a view of it": (lambda: with_user(lambda p: p[2:]), SHARED),
    "a state_dict": (lambda: with_user(lambda p: nn.ParameterList([p]).state_dict()), SHARED),
    "as a numpy array": (lambda: with_user(lambda p: p.detach().numpy()), SHARED),
    "through DLPack": (lambda: with_user(lambda p: p.detach().__dlpack__()), SHARED),
    "from numpy": (lambda: (nn.Parameter(torch.from_numpy(array())), None), FOREIGN),
    "from a Python buffer": (
        lambda: (nn.Parameter(torch.frombuffer(array(), dtype=torch.float32).view(6, 8)), None),
        FOREIGN,
    ),
    "shared memory": (
        lambda: (parameter().share_memory_(), None),
        "a copy: it is in shared or pinned memory",
    ),
    "column-major": (lambda: (torch.empty_strided((6, 8), (1, 6)).normal_(), None), PREPARE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_moves(name: str) -> None:
    make, kind = CASES[name]
    p, _alive = make()
    address = p.data_ptr()
    table = Constants(HOW)
    assert_kept(table, p, kind)
    assert (p.data_ptr() == address) == (kind != HOMED)
    with torch.no_grad():
        p.mul_(2)  # followed in either way
    assert_kept(table, p, kind)


def test_not_an_inference_tensor() -> None:
    with torch.inference_mode():
        x = torch.randn(6, 8)
    address = x.data_ptr()
    assert_kept(
        Constants(HOW), x, "computed on each call: an inference tensor has no version counter"
    )
    assert x.data_ptr() == address
    assert homes.why_not(x) == "it is an inference tensor"


@pytest.mark.parametrize("pad", [(0, 2), (0, 2, 0, 2), (0, 0, 2, 0), (0, 0, 1, 1)], ids=str)
def test_only_rows_behind_move_a_parameter(pad: tuple[int, ...]) -> None:
    table, p = Constants(Padding(pad, 5.0)), parameter()
    address = p.data_ptr()
    assert (table.of([p]).kind, p.data_ptr()) == (PREPARE, address)
    assert torch.equal(value_of(table, p), F.pad(p.detach(), pad, value=5.0))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [((6,), torch.bfloat16), ((6, 1), torch.float32), ((3, 4, 5), torch.float64)],
    ids=str,
)
def test_every_rank_and_dtype(size: tuple[int, ...], dtype: torch.dtype) -> None:
    how = Padding((*[0] * (2 * len(size) - 1), 2), 1.0)
    p = nn.Parameter(torch.randn(size).to(dtype))
    want, strides = F.pad(p.detach(), how.pad, value=1.0), p.stride()
    table = Constants(how)
    assert torch.equal(value_of(table, p), want)
    assert table.of([p]).kind == HOMED
    assert (p.shape, p.stride(), p.dtype) == (size, strides, dtype)


def test_no_second_copy_and_the_old_memory_is_freed() -> None:
    p = parameter()
    storage = torch.multiprocessing.reductions.StorageWeakRef(p.untyped_storage())
    value = assert_kept(Constants(HOW), p, HOMED)
    assert memory(value) == (p.data_ptr(), BYTES + 2 * 8 * 4)
    gc.collect()
    assert storage.expired()
    assert isinstance(p, nn.Parameter)
    assert p.is_leaf
    assert p.requires_grad
    assert p.is_contiguous()


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
def test_every_write_in_place_is_live(write: str) -> None:
    table, p, value = homed()
    new = torch.randn(6, 8)
    with torch.no_grad():
        WRITES[write](p, new)
    assert torch.equal(value, expected(new))  # before anybody looks
    assert assert_kept(table, p, HOMED) is value
    assert table.refreshes == 1


def test_a_training_step_is_live() -> None:
    table, p, value = homed()
    (p * 3).sum().backward()
    torch.optim.SGD([p], lr=0.5).step()
    assert assert_kept(table, p, HOMED) is value


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_again_after_another_dtype_and_back(dtype: torch.dtype) -> None:
    layer, table = nn.Linear(8, 6, bias=False), Constants(HOW)
    for wanted in (torch.float32, dtype, torch.float32):
        layer.to(wanted)
        assert assert_kept(table, layer.weight, HOMED).dtype == wanted


def test_again_at_the_same_address_after_data_is_set() -> None:
    table, p, value = homed()
    address = value.data_ptr()
    for _ in range(3):
        p.data = torch.randn(6, 8)
        assert assert_kept(table, p, HOMED).data_ptr() == address


def test_again_after_assign_and_deepcopy() -> None:
    table, layer = Constants(HOW), nn.Linear(8, 6, bias=False)
    assert_kept(table, layer.weight, HOMED)
    layer.load_state_dict({"weight": torch.randn(6, 8)}, assign=True)
    value = assert_kept(table, layer.weight, HOMED)
    twin = copy.deepcopy(layer)
    assert memory(twin.weight)[1] == BYTES  # its pads stay behind
    assert memory(assert_kept(table, twin.weight, HOMED)) != memory(value)
    with torch.no_grad():
        twin.weight.zero_()
    assert assert_kept(table, layer.weight, HOMED) is value


def test_again_once_nobody_else_uses_the_memory() -> None:
    table, layer = Constants(HOW), nn.Linear(8, 6, bias=False)
    state = layer.state_dict()
    assert_kept(table, layer.weight, SHARED)
    del state
    assert_kept(table, layer.weight, SHARED)  # nothing looks while the copy is fresh
    table.invalidate(layer.weight)
    assert_kept(table, layer.weight, HOMED)


def test_what_a_user_holds_is_not_overwritten() -> None:
    table, p, _ = homed()
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


def test_a_storage_that_a_user_holds_is_not_overwritten() -> None:
    table, p, _ = homed()
    storage, before = p.untyped_storage(), p.detach().clone()
    p.data = torch.zeros(6, 8)
    assert_kept(table, p, HOMED)
    assert torch.equal(torch.empty(0).set_(storage, 0, (6, 8), (8, 1)), before)


def test_not_while_a_user_holds_the_storage() -> None:
    p = parameter()
    storage = p.untyped_storage()
    assert_kept(Constants(HOW), p, SHARED)
    assert storage.data_ptr() == p.data_ptr()


def test_data_swapped_back_and_forth() -> None:
    table, p, value = homed()
    mine, other = p.data, torch.randn(6, 8)
    values = mine.clone(), other.clone()
    for turn in range(6):
        p.data = (other, mine)[turn % 2]
        assert_kept(table, p, (SHARED, HOMED)[turn % 2])
        assert torch.equal(mine, values[0])
        assert torch.equal(other, values[1])
    assert p.data_ptr() == value.data_ptr()


def test_two_parameters_swap_their_data() -> None:
    table, (p, q) = Constants(HOW), (parameter(), parameter())
    for x in (p, q):
        assert_kept(table, x, HOMED)
    values = p.detach().clone(), q.detach().clone()
    p.data, q.data = q.data, p.data
    for _ in range(2):
        for x, want in ((p, values[1]), (q, values[0])):
            assert torch.equal(value_of(table, x), expected(want))
            assert torch.equal(x, want)
    with torch.no_grad():
        p.zero_()
    for x in (p, q):
        assert_kept(table, x, table.of([x]).kind)
    assert torch.equal(q, values[0])


def test_two_paddings_of_one_parameter() -> None:
    p = parameter()
    assert_kept(Constants(HOW), p, HOMED)
    for rows, value, kind in ((1, 5.0, HOMED), (2, 5.0, HOMED), (3, 5.0, OTHER), (2, 4.0, OTHER)):
        table = Constants(Padding((0, 0, 0, rows), value))
        want = F.pad(p.detach(), (0, 0, 0, rows), value=value)
        assert torch.equal(value_of(table, p), want)
        assert table.of([p]).kind == kind


def test_leave_gives_memory_of_its_own() -> None:
    table, p, value = homed()
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


def test_the_memory_cannot_be_resized() -> None:
    # Sleep modes resize storages to nothing and back: the pads would be lost without a trace.
    table, p, _ = homed()
    with pytest.raises(RuntimeError, match="not resizable"):
        p.untyped_storage().resize_(0)
    assert_kept(table, p, HOMED)


def saved(state: Any, path: Path, **how: Any) -> Any:
    torch.save(state, path)
    return torch.load(path, **how)


def saved_as_safetensors(state: Any, path: Path) -> Any:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, path)
    return safetensors.load_file(path)


ROUND_TRIPS: dict[str, Callable[[Any, Path], Any]] = {
    "torch.save": saved,
    "torch.save, mapped": lambda state, path: saved(state, path, mmap=True),
    "pickle": lambda state, path: pickle.loads(pickle.dumps(state)),
    "safetensors": saved_as_safetensors,
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_saved_and_loaded(name: str, assign: bool, tmp_path: Path) -> None:
    table, layer = Constants(HOW), nn.Linear(8, 6)
    assert_kept(table, layer.weight, HOMED)
    want = {k: x.clone() for k, x in layer.state_dict().items()}
    state = ROUND_TRIPS[name](layer.state_dict(), tmp_path / "state")
    assert {k: x.shape for k, x in state.items()} == {"weight": (6, 8), "bias": (6,)}
    other = nn.Linear(8, 6)
    assert_kept(table, other.weight, HOMED)
    other.load_state_dict(state, assign=assign)
    assert all(torch.equal(x, want[k]) for k, x in other.state_dict().items())
    kind = table.of([other.weight]).kind
    assert (kind == HOMED) == (not assign)
    assert_kept(table, other.weight, kind)


def test_a_pickled_parameter_keeps_what_it_is() -> None:
    _, p, _ = homed()
    for data in (pickle.dumps(p), pickle.dumps({"p": p})):
        loaded = pickle.loads(data)
        twin = loaded["p"] if isinstance(loaded, dict) else loaded
        assert isinstance(twin, nn.Parameter)
        assert torch.equal(twin, p)
    buffer = io.BytesIO()
    torch.save(p, buffer)
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue())), p)


@pytest.mark.parametrize("direction", ["save", "load"])
def test_safetensors_of_a_model(direction: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    layer, path = nn.Linear(8, 6), str(tmp_path / "model")
    want = layer.weight.detach().clone()
    if direction == "load":
        safetensors.save_model(layer, path)
    assert_kept(Constants(HOW), layer.weight, HOMED)
    if direction == "save":
        safetensors.save_model(layer, path)
    safetensors.load_model(layer, path)
    assert torch.equal(layer.weight, want)


def test_one_parameter_in_two_modules() -> None:
    embedding, head = nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)
    head.weight = embedding.weight
    table, tokens = Constants(HOW), torch.tensor([0, 5])
    want = embedding(tokens).detach()
    value = assert_kept(table, head.weight, HOMED)
    assert head.weight is embedding.weight
    assert torch.equal(embedding(tokens), want)
    with torch.no_grad():
        embedding.weight.mul_(2)
    assert torch.equal(embedding(tokens), want * 2)
    assert assert_kept(table, head.weight, HOMED) is value
    state = copy.deepcopy(nn.ModuleList([embedding, head])).state_dict()
    assert memory(state["0.weight"]) == memory(state["1.weight"])
