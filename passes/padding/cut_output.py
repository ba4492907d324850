"""Cut a padded output back to N, as a view where no reader can tell it from the original.

A reader can tell that rows are further apart if its own result then looks different (``.view``
fails, an output keeps other strides), or if it reads the storage itself (``as_strided``, an opaque
op). For such a reader the cut is made contiguous, in one kernel, which Inductor fuses into
pointwise readers.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.purity import run_on_fakes
from compile_ext.passes.values import fake, same_size, storage

# They address the storage by numbers that the caller gives.
_READS_STORAGE = {"as_strided", "as_strided_copy", "as_strided_scatter", "set", "view_as_complex"}


def cut_output(node: Node, n: int, ctx: PassContext) -> None:
    """``y -> y[..., :n]`` for all readers of ``y``."""
    readers = list(node.users)
    cut = ctx.insert(node.next, operator.getitem, node, (..., slice(None, n)), like=node)
    views = {node: fake(cut)}
    if all(cannot_tell(x, views, ctx) for x in readers):
        new = cut
        del views[node]
        for view, value in views.items():
            view.meta["example_value"] = value
    else:
        # Not contiguous(): it leaves [1, n] with a row stride of the padded n, as torch calls that
        # contiguous.
        contiguous = torch.contiguous_format
        new = ctx.insert(cut.next, "clone", cut, memory_format=contiguous, like=node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not cut)
    ctx.stands_for(new, node)


def cannot_tell(reader: Node, views: dict[Node, Tensor], ctx: PassContext) -> bool:
    """Whether a reader gives the same with ``views`` in the place of contiguous tensors; views of
    theirs are added."""
    try:
        found = run_on_fakes(reader, ctx.scopes, views)
    except (RuntimeError, ValueError):  # .view, or a size known only at run time
        return False
    if found is None or any(_tells(op) for op in found[1]):
        return False
    value = found[0]
    before = fake(reader)
    if not isinstance(value, Tensor) or not isinstance(before, Tensor):
        return False
    if storage(value) in {storage(x) for x in views.values()}:
        views[reader] = value
        return all(cannot_tell(x, views, ctx) for x in reader.users)
    return same_form(value, before)


def same_form(x: Tensor, y: Tensor) -> bool:
    same = all(map(same_size, (*x.shape, *x.stride()), (*y.shape, *y.stride())))
    return same and (x.dtype, x.dim()) == (y.dtype, y.dim())


def _tells(op: OpOverload) -> bool:
    name = op._schema.name.split("::")[1].rstrip("_")
    # Inductor gives zeros_like of a view the view's strides, eager dense ones (torch 2.13).
    return name in _READS_STORAGE or name.endswith("_like")
