"""Re-homed parameters that are saved, loaded and shared by modules."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

HOMED = "re-homed: the parameter lives in it"


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
def test_saved_and_loaded(
    name: str, assign: bool, tmp_path: Path, table: Any, assert_kept: Any
) -> None:
    layer = nn.Linear(8, 6)
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


def test_a_pickled_parameter_keeps_what_it_is(homed: Any) -> None:
    p, _ = homed
    for data in (pickle.dumps(p), pickle.dumps({"p": p})):
        loaded = pickle.loads(data)
        twin = loaded["p"] if isinstance(loaded, dict) else loaded
        assert isinstance(twin, nn.Parameter)
        assert torch.equal(twin, p)
    buffer = io.BytesIO()
    torch.save(p, buffer)
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue())), p)


@pytest.mark.parametrize("direction", ["save", "load"])
def test_safetensors_of_a_model(
    direction: str, tmp_path: Path, table: Any, assert_kept: Any
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    layer, path = nn.Linear(8, 6), str(tmp_path / "model")
    want = layer.weight.detach().clone()
    if direction == "load":
        safetensors.save_model(layer, path)
    assert_kept(table, layer.weight, HOMED)
    if direction == "save":
        safetensors.save_model(layer, path)
    safetensors.load_model(layer, path)
    assert torch.equal(layer.weight, want)


def test_one_parameter_in_two_modules(table: Any, memory: Any, assert_kept: Any) -> None:
    embedding, head = nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)
    head.weight = embedding.weight
    tokens = torch.tensor([0, 5])
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
