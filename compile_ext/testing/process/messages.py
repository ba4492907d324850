"""What parent and child say to each other. Tensors travel as files: none dies with the child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from compile_ext.testing.memory import copied, tensors_in


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor: its index in the file, and its device in the child."""

    index: int
    device: str


@dataclass(frozen=True)
class Request:
    """Call ``op`` with ``arguments`` (by schema name) as they lie in ``file``.

    Args:
        kind: ``run`` it, or its ``fake`` alone.
        late: an argument; if any, run the op right behind a kernel that writes it only after a
            while.
    """

    op: str
    arguments: dict[str, Any]
    file: str
    kind: Literal["run", "fake"] = "run"
    late: str = ""


@dataclass(frozen=True)
class Done:
    """What the op returned, and its arguments after the call; ``note`` says what went otherwise."""

    results: Any
    arguments: dict[str, Any]
    file: str = ""
    note: str = ""


@dataclass(frozen=True)
class Raised:
    """The op raised; ``error`` is None where it cannot be pickled."""

    error: Exception | None
    text: str
    trace: str


def pack(tree: Any, devices: list[str], file: str) -> Any:
    """Save the tensors of ``tree``, which shall go to ``devices``; the tree with Slots for them."""
    tensors = tensors_in(tree)
    torch.save(tensors, file)
    slots = iter([Slot(i, device) for i, device in enumerate(devices)])
    return pytree.tree_map(lambda x: next(slots) if isinstance(x, Tensor) else x, tree)


def unpack(tree: Any, file: str, *, to_devices: bool) -> Any:
    """``tree`` with the tensors again: strides, offsets and shared storages as they were."""
    tensors = torch.load(file, weights_only=True)
    slots = [x for x in pytree.tree_leaves(tree) if isinstance(x, Slot)]
    if to_devices:  # copies also on the CPU: what is loaded cannot be resized, as an op may do
        device_of = {id(x): s.device for x, s in zip(tensors, slots, strict=True)}
        tensors = copied(tensors, lambda x: device_of[id(x)])
    return pytree.tree_map(lambda x: tensors[x.index] if isinstance(x, Slot) else x, tree)
