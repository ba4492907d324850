"""Re-homing: a parameter moves into its padded buffer and becomes the first part of it.

Its size and strides stay (where only rows are added), so that guards hold; there is no second copy,
and every write to the parameter is a write to the buffer. Its storage is one of its own, over the
visible part of the memory: what saves or copies storages (torch.save, safetensors, deepcopy) never
sees the pad, and nothing can resize it. What its memory was before is freed, so only a parameter
that alone owns its memory moves. Raw addresses of it (CUDA graphs captured by hand, IPC handles)
end with the move: ``compile_ext.rehome=False``.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import WeakIdKeyDictionary

from compile_ext.passes.derivation import Derivation, Padding

# parameter -> (its padded buffer, how it is padded, its shape then); an entry dies with the
# parameter
_HOMES = WeakIdKeyDictionary()


def has_moved(p: Tensor) -> bool:
    """Whether p is the first part of a padded buffer."""
    home = _HOMES.get(p)
    return home is not None and _lives_in(p, home[0], home[2])


def why_not(p: Tensor) -> str | None:
    """Why this parameter cannot move into a buffer, or None."""
    if has_moved(p):
        return "it lives in the buffer of another padding"
    if p.is_inference() or p._is_view():
        return "it is an inference tensor" if p.is_inference() else "it is a view"
    users = _users(p)  # before the next line makes one more
    storage = p.untyped_storage()
    if p.storage_offset() or storage.nbytes() != p.numel() * p.element_size():
        return "it is a part of a larger tensor"
    if users != _users_of_one():
        return "something else uses its memory"
    if not storage.resizable():
        return "its memory belongs to another library or to a file"
    if p.device.type == "cpu" and (storage.is_shared() or p.is_pinned()):
        return "it is in shared or pinned memory"
    return None


def _users(p: Tensor) -> tuple[int, int, int]:
    """Tensors on its storage, handles of itself (DLPack takes one), holders of the storage object
    (it is one object for all)."""
    storage = p.untyped_storage()
    handles: int = p._use_count()  # type: ignore[attr-defined]
    return torch._C._storage_Use_Count(storage._cdata), handles, sys.getrefcount(storage)


@functools.cache
def _users_of_one() -> tuple[int, int, int]:
    """What a tensor has that nobody else uses: it differs between versions of torch."""
    return _users(torch.empty(1))


def find(p: Tensor, how: Padding) -> Tensor | None:
    """The buffer that holds ``how(p)``, if p is the first part of one."""
    home = _HOMES.get(p)
    if home is None:
        return None
    buffer, made, shape = home
    if made.exact_value != how.exact_value or not _lives_in(p, buffer, shape):
        return None
    widths = how.widths(p.dim())
    wanted = [size + after for size, (_, after) in zip(p.shape, widths, strict=True)]
    if any(before for before, _ in widths) or wanted[1:] != list(buffer.shape[1:]):
        return None
    if not buffer.is_contiguous() and made.keep_order != how.keep_order:
        return None
    if wanted[0] == buffer.shape[0]:
        return buffer  # type: ignore[no-any-return]
    return buffer.narrow(0, 0, wanted[0]) if wanted[0] < buffer.shape[0] else None


def _lives_in(p: Tensor, buffer: Tensor, shape: torch.Size) -> bool:
    # Behind a p that has shrunk lies old data, not the pad.
    here = p.data_ptr(), p.shape, p.stride(), p.dtype, p.device
    return here == (buffer.data_ptr(), shape, buffer.stride(), buffer.dtype, buffer.device)


def move(p: Tensor, how: Padding) -> Tensor:
    """Make p the first part of ``how(p)``; ``why_not(p)`` must be None. The padded buffer keeps its
    address where p has had one of that form and nobody else uses it any more."""
    home = _HOMES.pop(p, None)
    buffer = how(p)
    if home is not None and home[1].exact_value == how.exact_value and can_hold(home[0], buffer):
        buffer = home[0].copy_(buffer)
    p.data = _first_part(buffer, p.shape)
    _HOMES[p] = buffer, how, p.shape
    return buffer


def _first_part(buffer: Tensor, shape: torch.Size) -> Tensor:
    part = buffer
    for dim, size in enumerate(shape):
        part = part.narrow(dim, 0, size)
    if part.is_meta:
        return part
    # Through DLPack: a storage of its own, that keeps the buffer alive. As bytes, since not every
    # version knows float8 there; bytes want the innermost dimension last.
    order = sorted(range(part.dim()), key=part.stride, reverse=True)
    made = from_dlpack(part.permute(order).view(torch.uint8)).view(part.dtype)
    return made.permute([order.index(d) for d in range(part.dim())])


def can_hold(old: Tensor, new: Tensor) -> bool:
    """Whether ``new`` can be written into ``old``: the form is the same, and no other tensor lives
    in its storage (the two that are counted are ``old`` and the storage's Python object)."""
    forms = [(x.shape, x.stride(), x.dtype, x.device) for x in (old, new)]
    users: int = torch._C._storage_Use_Count(old.untyped_storage()._cdata)
    return forms[0] == forms[1] and users == 2


def cost(how: Derivation, p: Tensor, nbytes: int) -> int:
    """What ``how(p)`` of that size adds to the memory of p."""
    if not isinstance(how, Padding):
        return nbytes
    if find(p, how) is not None:
        return 0
    if how.keeps_as_prefix(p) and why_not(p) is None:
        return nbytes - p.numel() * p.element_size()
    return nbytes


def cost_in_place(how: Derivation, p: Tensor, nbytes: int) -> int:
    """The same where no parameter may move."""
    return 0 if isinstance(how, Padding) and find(p, how) is not None else nbytes


def leave(p: Tensor) -> bool:
    """Give p memory of its own again; whether it had moved."""
    if not has_moved(p):
        return False
    p.data = p.detach().clone(memory_format=torch.contiguous_format)
    _HOMES.pop(p)
    return True
