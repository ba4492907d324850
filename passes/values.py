"""What a node stands for: its fake tensor, its storage, the range of a size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg

# Meta key of an extra input: the derivation that it holds the result of, as text.
DERIVED = "compile_ext_derived"


def fake(value: Any) -> Any:
    """The example value of a node (a FakeTensor, a SymInt, a tuple of them); anything else as it
    is.
    """
    return value.meta.get("example_value") if isinstance(value, Node) else value


def fakes(args: Any) -> Any:
    """``args`` with every node in it, at any depth, replaced by its example value."""
    return map_arg(args, fake)


def substitute(args: Any, values: Mapping[Node, Any]) -> Any:
    """``args`` with every node replaced by its value here, or else by its example value."""
    return map_arg(args, lambda x: values[x] if x in values else fake(x))


def same_size(x: int | torch.SymInt, y: int | torch.SymInt) -> bool:
    """Whether two sizes are known to be equal; adds no guard."""
    if isinstance(x, torch.SymInt) and isinstance(y, torch.SymInt):
        return bool(x.node.expr == y.node.expr)
    return is_static(x) and is_static(y) and x == y


def fake_mode(scopes: Iterable[Any]) -> FakeTensorMode:
    """The fake mode that Dynamo traced these graphs under."""
    for scope in scopes:
        for node in scope.graph.nodes:
            value = fake(node)
            if isinstance(value, FakeTensor):
                return value.fake_mode
    raise AssertionError("a candidate was found in graphs without tensors")


def call_on_fakes(
    node: Node,
    args: Any,
    kwargs: Any,
    mode: FakeTensorMode,
    watch: AbstractContextManager[Any] | None = None,
) -> Any:
    """What the function or method of a node gives for these fakes; adds no guard. ``watch`` sees
    the ATen ops that it calls."""
    quiet = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
    # Without the Python dispatcher, composite ops run in C++ and turn a symbolic M into a number.
    with torch.no_grad(), enable_python_dispatcher(), mode, quiet, watch or nullcontext():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def tensor(value: Any) -> Tensor | None:
    """The fake tensor of a node, or None if it stands for something else."""
    found = fake(value)
    return found if isinstance(found, Tensor) else None


def storage(value: Any) -> int | None:
    """Identity of the storage that a node's tensor lives in: fakes of views share it with their
    base.
    """
    found = tensor(value)
    while found is not None and is_functorch_wrapped_tensor(found):
        found = get_unwrapped(found)
    if found is None or found.layout != torch.strided:
        return None
    return int(found.untyped_storage()._cdata)


def in_transform(value: Any) -> bool:
    """Whether a node's tensor is a wrapper of vmap, grad and the like."""
    found = tensor(value)
    return found is not None and is_functorch_wrapped_tensor(found)


def is_static(size: Any) -> bool:
    """Whether a size is a number: an int, or a symbol that Dynamo has found to be one (K of an
    activation under ``dynamic=True``, which the weight fixes).
    """
    if isinstance(size, torch.SymInt):
        return size.node.maybe_as_int() is not None
    return isinstance(size, int)


def value_in_this_call(x: torch.SymFloat) -> float:
    """The number that an input of the graph is in the call that compiles it; adds no guard."""
    with x.node.shape_env.suppress_guards():
        return float(x)


def has_free_size(value: Any) -> bool:
    """Whether a size of this tensor comes from data (``x[mask]``), and not from a shape."""
    found = tensor(value)
    # Loads sympy, 0.2 s: not at import time.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return found is not None and bool(free_unbacked_symbols(found))


def bounds(size: int | torch.SymInt) -> tuple[int, int | None]:
    """The smallest and the largest value of a size; None for no upper bound."""
    if isinstance(size, int):
        return size, size
    node = size.node
    shape_env = getattr(node, "shape_env", None)
    if shape_env is None:
        return 0, None
    found = shape_env.bound_sympy(node.expr)
    upper = int(found.upper) if found.upper.is_Integer and int(found.upper) < 2**62 else None
    return (int(found.lower) if found.lower.is_Integer else 0), upper


def requires_grad(node: Node) -> bool:
    """What the fake says. Under no_grad that alone proves nothing: the fake of ``F.pad(parameter)``
    says True.
    """
    found = fake(node)
    leaves = found if isinstance(found, (tuple, list)) else (found,)
    return any(isinstance(x, Tensor) and x.requires_grad for x in leaves)


def dtype_name(x: Tensor | torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")


def range_text(low: int, high: int | None) -> str:
    """``5``, ``2..512``, or ``2..`` for no upper bound."""
    return str(low) if low == high else f"{low}..{'' if high is None else high}"
