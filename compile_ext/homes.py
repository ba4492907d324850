"""Re-homing: a parameter moves into its padded buffer and becomes the first part of it.

Its size and strides stay (where only rows are added), so that guards hold; there is no second copy,
and every write to the parameter is a write to the buffer. What its memory was before is freed, so
only a parameter that alone owns its memory moves. Raw addresses of it (CUDA graphs captured by
hand, IPC handles) end with the move: ``compile_ext.rehome=False``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from compile_ext.passes.derivation import Padding

# parameter -> (its padded buffer, the pad value); an entry dies with the parameter
_HOMES = WeakIdKeyDictionary()


def why_not(p: Tensor) -> str | None:
    """Why this parameter cannot move into a buffer, or None."""
    if p.is_inference() or p._is_view():
        return "it is an inference tensor" if p.is_inference() else "it is a view"
    storage = p.untyped_storage()
    if p.storage_offset() or storage.nbytes() != p.numel() * p.element_size():
        return "it is a part of a larger tensor"
    # The parameter and the storage object just made; views, and exports through DLPack, add to it.
    handles: int = p._use_count()  # type: ignore[attr-defined]
    if torch._C._storage_Use_Count(storage._cdata) != 2 or handles != 1:
        return "something else uses its memory"
    if not storage.resizable():
        return "its memory belongs to another library or to a file"
    if p.device.type == "cpu" and (storage.is_shared() or p.is_pinned()):
        return "it is in shared or pinned memory"
    return None


def find(p: Tensor, how: Padding) -> Tensor | None:
    """The buffer that holds ``how(p)``, if p is the first part of one."""
    buffer, value = _HOMES.get(p, (None, 0.0))
    if buffer is None or value != how.value or not _lives_in(p, buffer):
        return None
    widths = how.widths(p.dim())
    wanted = [size + after for size, (_, after) in zip(p.shape, widths, strict=True)]
    if any(before for before, _ in widths) or wanted[1:] != list(buffer.shape[1:]):
        return None
    return buffer.narrow(0, 0, wanted[0]) if wanted[0] <= buffer.shape[0] else None


def _lives_in(p: Tensor, buffer: Tensor) -> bool:
    here = p.data_ptr(), p.stride(), p.dtype, p.device
    return here == (buffer.data_ptr(), buffer.stride(), buffer.dtype, buffer.device)


def move(p: Tensor, how: Padding) -> Tensor:
    """Make p the first part of ``how(p)``; ``why_not(p)`` must be None. The padded buffer keeps its
    address where p has had one of that form and nobody else uses it any more."""
    old, value = _HOMES.pop(p, (None, 0.0))
    buffer = how(p)
    if old is not None and value == how.value and _is_free(old, buffer):
        buffer = old.copy_(buffer)
    part = buffer
    for dim, size in enumerate(p.shape):
        part = part.narrow(dim, 0, size)
    p.data = part
    _HOMES[p] = buffer, how.value
    return buffer


def _is_free(old: Tensor, new: Tensor) -> bool:
    forms = [(x.shape, x.stride(), x.dtype, x.device) for x in (old, new)]
    storage = old.untyped_storage()
    return forms[0] == forms[1] and torch._C._storage_Use_Count(storage._cdata) == 2


def leave(p: Tensor) -> bool:
    """Give p memory of its own again; whether it had moved."""
    buffer, _ = _HOMES.pop(p, (None, 0.0))
    if buffer is None or not _lives_in(p, buffer):
        return False
    p.data = p.detach().clone(memory_format=torch.contiguous_format)
    return True
