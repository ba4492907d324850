"""Find an op in a child process that was not forked: which modules of the parent may have defined
it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable

import torch
from torch._ops import OpOverload

from compile_ext.ops.call_site import find_overload
from compile_ext.ops.contract import OpContract

# Name and file of a module. pytest gives test modules names that no path leads to.
Source = tuple[str, str | None]
_REGISTERED = re.compile(r"registered at (.+\.py):\d+")


def sources(
    op: OpOverload, contract: OpContract, names: Iterable[str], caller: str
) -> list[Source]:
    """Modules to try, the most probable first: ``names``, those that registered the op, those of
    the contract's predicates, the caller's."""
    modules = list(names)
    for each in (op, contract.m1_variant):
        if each is not None:
            modules += [m for m in map(_module_of, _files(each)) if m]
            definition = _custom_op(each)
            modules += [definition] if definition else []
    modules += [str(p.__module__) for p in contract.unread.values() if hasattr(p, "__module__")]
    modules.append(caller)
    # The main module is made again by multiprocessing.
    return [(m, _file(m)) for m in dict.fromkeys(modules) if m != "__main__"]


def find(
    ops: Iterable[str], libraries: Iterable[str], modules: Iterable[Source]
) -> tuple[str, str] | None:
    """Make the ops known to this process. Which one could not be, and what was tried; or None."""
    tried: list[str] = []
    missing = ""

    def all_there() -> bool:
        nonlocal missing
        for name in ops:
            try:
                find_overload(name)
            except (AttributeError, RuntimeError):
                missing = name
                return False
        return True

    steps = [*((None, x) for x in libraries), *modules]
    for name, file in steps:
        if all_there():
            return None
        what = name or str(file)
        try:
            torch.ops.load_library(file) if name is None else _import(name, file)
        except Exception as error:  # noted: the op may come from the next one
            tried.append(f"{what} ({type(error).__name__}: {error})")
        else:
            tried.append(what)
    return None if all_there() else (missing, ", ".join(tried) or "nothing")


def _import(name: str, file: str | None) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(name, file) if file else None
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _files(op: OpOverload) -> list[str]:
    """The Python files that registered something for ``op``, as the dispatcher remembers them."""
    found = _REGISTERED.findall(torch._C._dispatch_dump(op._schema.name + _suffix(op)))
    inside_torch = os.path.dirname(torch.__file__)
    return [f for f in dict.fromkeys(found) if not f.startswith(inside_torch)]


def _suffix(op: OpOverload) -> str:
    return f".{op._schema.overload_name}" if op._schema.overload_name else ""


def _module_of(file: str) -> str | None:
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file:
            return name
    return None


def _custom_op(op: OpOverload) -> str | None:
    """The module of the function below ``torch.library.custom_op``."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(op._schema.name)
    return str(definition._init_fn.__module__) if definition is not None else None


def _file(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)
