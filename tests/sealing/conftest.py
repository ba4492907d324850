"""What the tests of the seal share: a small model, and what a seal heard."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext.sealing import switch, telling


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.proj(x))


class Model(nn.Module):
    def __init__(self, offset: int) -> None:
        super().__init__()
        self.layer, self.offset = Layer(), offset

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.offset


_OFFSETS = itertools.count(2)


@pytest.fixture
def model() -> Model:
    """Another graph in each test: one that no cache has."""
    return Model(next(_OFFSETS)).requires_grad_(False)


@pytest.fixture
def heard() -> list[compile_ext.CompileEvent]:
    """What ``seal(heard.append)`` is told."""
    return []


@pytest.fixture(autouse=True)
def no_seal_is_left() -> Iterator[None]:
    yield
    assert switch._on == []
    assert telling.listeners == ()


@pytest.fixture(scope="session", autouse=True)
def fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing was compiled by an earlier run. One for all: Inductor tries the C++ compiler out in
    each, for 5 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
