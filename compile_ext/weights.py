"""What a user does with the weights of a compiled model: refresh, prepare, restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from compile_ext import derived, homes, records
from compile_ext.backend import compile_ext_backend
from compile_ext.derived import Constant
from compile_ext.ops.errors import CompileExtError
from compile_ext.passes.derivation import Derivation, Padding
from compile_ext.tensors import names_of, original, roots_of, tensors_of


def refresh(model: Any) -> int:
    """Compute all constants that were derived from the weights of a model anew, in place.

    For writes that leave no trace: ``p.data.copy_(...)``, NCCL or a kernel writing to a raw
    address; and for CUDA graphs captured by hand, whose replay does not look at the weights. All
    other updates are seen by the next call.

    Args:
        model: an nn.Module, what ``torch.compile`` returned for one, or a compiled function.

    Returns:
        how many constants there were.

    Raises:
        CompileExtError: there is no tensor in ``model``.
    """
    return derived.refresh(_weights(model))


def prepare(model: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
    """Move weights whose K is padded into their padded buffers, before the first compilation.

    A weight ``[n, k]`` that a kernel needs as ``[n, k']`` becomes the first k columns of a buffer:
    no second copy, and every write is seen. Its strides change, to ``(k', 1)``: ``p.view(-1)``
    fails then, and safetensors refuses to save it until ``restore(model)``. Without this function
    the padded weight is a copy. (Where only rows are added nothing needs to be prepared.)

    Args:
        model: an nn.Module or a function that uses one.
        args, kwargs: the model runs once on them, with the ops' own kernels and no compiler, to see
            which weights are padded.

    Returns:
        for each weight that is padded, by path: ``re-homed``, or why it was not.
    """
    target = original(model)
    look: Any = torch.compile(target, backend=_look)
    with torch.no_grad():
        look(*args, **kwargs)
    names = names_of(roots_of(target).items())
    found: dict[str, str] = {}
    for record in records.hidden():
        for tensors, binding in record.served():
            if not any(id(x) in names for x in tensors.values()):
                continue
            for (_, table), (_, constant) in zip(record.constants, binding.constants, strict=True):
                for p in _only_source(constant):
                    name = names.get(id(p), "?")
                    found[name] = _move(p, table.derivation) or found.get(name, "re-homed")
                table.drop(constant)  # of the form that the weights had: a copy where K is padded
            record.bindings.clear()
    return found


def _look(gm: GraphModule, inputs: Sequence[Any]) -> Any:
    with records.hiding():
        return compile_ext_backend(gm, inputs, options={"compile_ext.inner": "eager"})


def _only_source(constant: Constant) -> Iterator[Tensor]:
    sources = [x for r in constant.sources if (x := r()) is not None]
    if len(sources) == len(constant.sources) == 1:
        yield sources[0]


def _move(p: Tensor, how: Derivation) -> str | None:
    """Why it was not re-homed, or None."""
    if not isinstance(how, Padding):
        return f"it is computed ({how})"
    if any(before for before, _ in how.widths(p.dim())):
        return "it is padded in front"
    with derived.moving(p.device):
        if homes.find(p, how) is not None:
            return None
        reason = homes.why_not(p)
        if reason is None:
            homes.move(p, how)
        return reason


def restore(model: Any) -> int:
    """Give all weights that live in padded buffers memory of their own again.

    Undoes ``prepare`` and the re-homing of compiled calls, for code that needs plain tensors
    (safetensors, raw addresses). The next compiled call re-homes weights again, unless it was
    compiled with ``compile_ext.rehome=False``.

    Returns:
        how many weights moved.

    Raises:
        CompileExtError: there is no tensor in ``model``.
    """
    moved = 0
    for p in _weights(model):
        if homes.has_moved(p):
            with derived.moving(p.device):
                moved += homes.leave(p)
    return moved


def _weights(model: Any) -> list[Tensor]:
    """Each tensor of a model once."""
    found = list({id(x): x for _, x in tensors_of(original(model))}.values())
    if not found:
        raise CompileExtError(
            "compile_ext.refresh, prepare, restore",
            f"a {type(model).__name__} without tensors",
            "an nn.Module, what torch.compile returned for one, or a function that uses one",
            "pass the model itself",
        )
    return found
