"""The paths of the modules that tensors belong to, over all models in the process: looked for when
something is compiled, which takes longer."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from compile_ext import records
from compile_ext.tensors import tensors_of


def modules_of(tensors: Iterable[object]) -> tuple[str, ...]:
    """Paths of the modules that these tensors are weights of, or constants derived from weights."""
    wanted = {_address(x) for x in tensors} - {0}
    if not wanted:
        return ()
    for record in records.live():
        for _, binding in record.served():
            for _, constant in binding.constants:
                if _address(constant.value) in wanted:
                    wanted |= {_address(r()) for r in constant.sources} - {0}
    return tuple(
        dict.fromkeys(
            path.removesuffix(".weight")
            for root in _roots()
            for path, tensor in tensors_of(root)
            if _address(tensor) in wanted
        )
    )


def path_of(module: nn.Module) -> str:
    """The path of a module in its model, or "" for a model that is part of none."""
    found = (
        path.replace("_orig_mod.", "").removesuffix("_orig_mod")
        for root in _roots()
        for path, other in root.named_modules()
        if other is module
    )
    return next((x for x in found if x), "")  # torch.compile has put some into a module of its own


def _roots() -> list[nn.Module]:
    """The models: modules that are part of no other, but for compiled graphs."""
    every = [x for x in gc.get_objects() if issubclass(type(x), nn.Module)]
    # One whose __init__ still runs, or has failed, has no children yet.
    whole = [x for x in every if not isinstance(x, GraphModule) and "_modules" in vars(x)]
    inner = {id(child) for x in whole for child in x._modules.values()}
    return [x for x in whole if id(x) not in inner]


def _address(x: object) -> int:
    """0 where there is no memory."""
    if not isinstance(x, Tensor) or isinstance(x, FakeTensor) or x.is_meta:
        return 0
    try:
        return x.data_ptr()
    except RuntimeError:  # of a tensor that wraps others, or is sparse
        return 0
