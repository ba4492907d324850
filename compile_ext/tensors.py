"""The tensors that a model, a compiled model or a function can reach, by module path."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CellType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def original(model: Any) -> Any:
    """What was handed to ``torch.compile``."""
    target = getattr(model, "_orig_mod", model)
    return getattr(target, "_torchdynamo_orig_callable", target)


def names_of(roots: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """id of each tensor that belongs to the roots of a target -> module path."""
    found: dict[int, str] = {}
    for root, value in roots:
        for path, tensor in _tensors(root, value):
            found.setdefault(id(tensor), path.removesuffix(".weight"))
    return found


def tensors_of(target: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors that belong to the target, by path; one that has two paths comes twice."""
    for name, value in roots_of(target).items():
        yield from _tensors(name, value)


def handed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The models and parameters among the arguments of a call, named as those of a partial are."""
    for name, value in [*((str(i), x) for i, x in enumerate(args)), *kwargs.items()]:
        weights = [x for x in tree_leaves(value) if isinstance(x, nn.Module | nn.Parameter)]
        yield from ((name if x is value else f"{name}.{i}", x) for i, x in enumerate(weights))


def _tensors(
    path: str, value: Any, around: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value: of a module its parameters and buffers, and plain attributes too.
    ``around``: the ids of what holds it, for a child that keeps its parent in a list."""
    if isinstance(value, Tensor):
        yield path, value
    elif id(value) in around:
        return
    elif isinstance(value, nn.Module):
        inside = around | {id(module) for module in value.modules()}
        for prefix, module in value.named_modules(remove_duplicate=False):
            here = _join(path, prefix.replace("_orig_mod.", "").removesuffix("_orig_mod"))
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield _join(here, name), tensor
            for name, attribute in vars(module).items():
                if not name.startswith("_"):
                    yield from _tensors(_join(here, name), attribute, inside)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors(_join(path, str(i)), item, around | {id(value)})
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(_join(path, str(key)), item, around | {id(value)})


def _join(*parts: str) -> str:
    return ".".join(p.strip(".") for p in parts if p.strip("."))


def roots_of(target: Any) -> dict[str, Any]:
    """What a compiled thing can reach: a module itself, or what a function reads from around it."""
    if isinstance(target, nn.Module):
        return {"": target}
    # Dynamo wraps a partial, and a method of torch's own modules.
    function = inspect.unwrap(target, stop=lambda f: hasattr(f, "__self__"))
    if isinstance(function, functools.partial):
        bound = {str(i): value for i, value in enumerate(function.args)}
        return {**roots_of(function.func), **bound, **function.keywords}
    owner = getattr(function, "__self__", None)
    if owner is not None:  # torch.compile(model.forward)
        return roots_of(owner) if isinstance(owner, nn.Module) else vars(owner)
    if not inspect.isfunction(function):
        return dict(vars(function)) if hasattr(function, "__dict__") else {}
    code = function.__code__
    names = {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    return {**names, **{n: v for n, cell in cells for v in _contents(cell)}}


def _contents(cell: CellType) -> Iterator[Any]:
    """What a cell holds; nothing before the variable is assigned."""
    with contextlib.suppress(ValueError):
        yield cell.cell_contents
