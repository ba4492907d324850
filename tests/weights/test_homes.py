"""Re-homing: what moves into its padded buffer, and what stays."""

from __future__ import annotations

import gc
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
PART = "a copy: it is a part of a larger tensor"
SHARED = "a copy: something else uses its memory"
FOREIGN = "a copy: its memory belongs to another library or to a file"
PREPARE = "a copy: more than rows is added (compile_ext.prepare moves the parameter)"
BYTES = 6 * 8 * 4


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 8))


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
def test_what_moves(name: str, table: Any, assert_kept: Any) -> None:
    make, kind = CASES[name]
    p, _alive = make()
    address = p.data_ptr()
    assert_kept(table, p, kind)
    assert (p.data_ptr() == address) == (kind != HOMED)
    with torch.no_grad():
        p.mul_(2)  # followed in either way
    assert_kept(table, p, kind)


def test_not_an_inference_tensor(table: Any, assert_kept: Any) -> None:
    with torch.inference_mode():
        x = torch.randn(6, 8)
    address = x.data_ptr()
    assert_kept(table, x, "computed on each call: an inference tensor has no version counter")
    assert x.data_ptr() == address
    assert homes.why_not(x) == "it is an inference tensor"


@pytest.mark.parametrize("pad", [(0, 2), (0, 2, 0, 2), (0, 0, 2, 0), (0, 0, 1, 1)], ids=str)
def test_only_rows_behind_move_a_parameter(pad: tuple[int, ...]) -> None:
    p = parameter()
    address = p.data_ptr()
    constant: Any = Constants(Padding(pad, 5.0)).of([p])
    assert (constant.kind, p.data_ptr()) == (PREPARE, address)
    assert torch.equal(constant.value, F.pad(p.detach(), pad, value=5.0))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [((6,), torch.bfloat16), ((6, 1), torch.float32), ((3, 4, 5), torch.float64)],
    ids=str,
)
def test_every_rank_and_dtype(size: tuple[int, ...], dtype: torch.dtype) -> None:
    how = Padding((*[0] * (2 * len(size) - 1), 2), 1.0)
    p = nn.Parameter(torch.randn(size).to(dtype))
    want, strides = F.pad(p.detach(), how.pad, value=1.0), p.stride()
    constant: Any = Constants(how).of([p])
    assert torch.equal(constant.value, want)
    assert constant.kind == HOMED
    assert (p.shape, p.stride(), p.dtype) == (size, strides, dtype)


def test_no_second_copy_and_the_old_memory_is_freed(
    table: Any, memory: Any, assert_kept: Any
) -> None:
    p = parameter()
    storage = torch.multiprocessing.reductions.StorageWeakRef(p.untyped_storage())
    value = assert_kept(table, p, HOMED)
    assert memory(value) == (p.data_ptr(), BYTES + 2 * 8 * 4)
    gc.collect()
    assert storage.expired()
    assert isinstance(p, nn.Parameter)
    assert p.is_leaf
    assert p.requires_grad
    assert p.is_contiguous()
