"""Attributes of other packages that a seal replaces, and puts back."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from compile_ext.sealing.telling import as_part_of


class Patch(NamedTuple):
    """A function to wrap.

    Args:
        module: that holds it, or its class; patched when it is imported, if it is not yet.
        name: ``function`` or ``Class.method``.
        wrap: gets the original, returns what takes its place.
    """

    module: str
    name: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]


class Patches:
    """A set of patches, put in and taken out together. Others may have wrapped what is patched,
    before or after: theirs stays, and one of ours that cannot be taken out does nothing more."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._undo: list[Callable[[], None]] = []
        self._finder = _Finder({p.module for p in patches}, self._apply)

    def put_in(self) -> None:
        for name in dict.fromkeys(p.module for p in self._patches):
            module = sys.modules.get(name)
            if module is not None:
                self._apply(module)
        sys.meta_path.insert(0, self._finder)

    def take_out(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        while self._undo:
            self._undo.pop()()

    def _apply(self, module: ModuleType) -> None:
        for patch in self._patches:
            if patch.module == module.__name__:
                self._undo.append(_replace(module, patch))


def _replace(module: ModuleType, patch: Patch) -> Callable[[], None]:
    *path, name = patch.name.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    watching = patch.wrap(original)
    on = [True]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (watching if on else original)(*args, **kwargs)

    setattr(owner, name, as_part_of(original, call))

    def undo() -> None:
        on.clear()
        if vars(owner).get(name) is call:
            setattr(owner, name, original)

    return undo


class _Finder:
    """Of ``sys.meta_path``: says when one of the modules has been imported."""

    def __init__(self, modules: set[str], imported: Callable[[ModuleType], None]) -> None:
        self._modules, self._imported = modules, imported

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._modules:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._after_loading(spec.loader)
                return spec
        return None

    def _after_loading(self, loader: Any) -> None:
        execute, imported = loader.exec_module, self._imported

        def exec_module(module: ModuleType) -> None:
            execute(module)
            imported(module)

        loader.exec_module = exec_module
