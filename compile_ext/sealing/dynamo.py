"""Dynamo: a frame that it traces, for the first time or again, for any backend.

Refused before the trace begins, so that nothing of the frame is marked or learnt. Read in torch
2.13; ``CatchErrorsWrapper`` is what torch calls where no compiled entry of a frame fits.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

from compile_ext.sealing.calls import described, frames
from compile_ext.sealing.event import CompileEvent
from compile_ext.sealing.modules import path_of
from compile_ext.sealing.patches import Patch
from compile_ext.sealing.telling import surfacing, tell

_FIRST = "call the model with such arguments before the seal"
_AGAIN = f"{_FIRST}; where a size differs, torch._dynamo.mark_dynamic(x, dim) before its first call"


def _watching(compile: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(compile)

    def watching(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        try:
            tell(lambda: _event(given["code"], given["locals"]))
        except BaseException:
            _uncount(given["compile_id"])
            raise
        return compile(*args, **kwargs)

    _TRACES.add(watching.__code__)
    return watching


_TRACES: set[CodeType] = set()
PATCHES = (
    Patch("torch._dynamo.convert_frame", "_compile", _watching),
    Patch("torch._dynamo.convert_frame", "CatchErrorsWrapper.__call__", surfacing),
)


def _uncount(compile_id: Any) -> None:
    """A compile that did not happen: after 256 Dynamo leaves the frame to eager for good."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER

    if compile_id.frame_compile_id is not None:
        FRAME_COMPILE_COUNTER[compile_id.frame_id] = compile_id.frame_compile_id


def module_traced() -> tuple[str, ...]:
    """The path of the module whose method Dynamo compiles in this thread, if it does."""
    for frame in frames():
        if frame.f_code in _TRACES:
            given = frame.f_locals["given"]
            return _path(_owner(given["code"], given["locals"]))
    return ()


def _owner(code: CodeType, variables: dict[str, Any]) -> nn.Module | None:
    """The module whose method a frame runs. Around what is torch's own Dynamo puts a function that
    has it in ``fn``."""
    if _is_around(code):
        found = variables.get("fn")
        found = getattr(found, "__self__", found)
    else:
        found = variables.get(code.co_varnames[0]) if code.co_argcount else None
    return found if isinstance(found, nn.Module) else None


def _is_around(code: CodeType) -> bool:
    from torch._dynamo import external_utils

    return code.co_filename == external_utils.__file__


def _path(module: nn.Module | None) -> tuple[str, ...]:
    path = path_of(module) if module is not None else ""
    return (path,) if path else ()


def _event(code: CodeType, variables: dict[str, Any]) -> CompileEvent:
    owner = _owner(code, variables)
    reason = _why_again(code, variables)
    arguments = {x: variables[x] for x in _argument_names(code) if x in variables}
    name, place = code.co_name, code
    if owner is not None:
        if _is_around(code):
            place = getattr(type(owner).forward, "__code__", code)
        name = f"{type(owner).__name__}.{place.co_name}"
    return CompileEvent(
        "dynamo",
        f"{name} ({place.co_filename}:{place.co_firstlineno})",
        described(arguments),
        modules=_path(owner),
        fix=_AGAIN if reason else _FIRST,
        reason=reason,
    )


def _argument_names(code: CodeType) -> tuple[str, ...]:
    """With ``*args`` and ``**kwargs``."""
    more = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + more]


def _why_again(code: CodeType, variables: dict[str, Any]) -> str:
    """The guard of each compiled entry of a frame that fails; "" where there is none."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = _debug_get_cache_entry_list(code)
    return "; ".join(dict.fromkeys(_failed_guard(x.guard_manager, variables) for x in entries))


def _failed_guard(manager: Any, variables: dict[str, Any]) -> str:
    said = manager.check_verbose(variables)
    if said.result:
        return "another backend, or other options of torch.compile"
    parts = said.verbose_code_parts
    if len(parts) > 1:  # all of a group: the first that is false
        names = {"L": variables, "G": manager.global_scope["G"], **manager.closure_vars}
        parts = [x for x in parts if not _holds(x, {**manager.global_scope, **names})] or parts
    text = str(parts[0]).split("  #")[0] if parts else "a guard fails"
    return " ".join(re.sub(r"\bL\['(\w+)'\]", r"\1", text).split())


def _holds(guard: str, names: dict[str, Any]) -> bool:
    try:
        return bool(eval(guard, names))
    # Any error of what the guard looks at: then it is not the one that is shown.
    except Exception:
        return True
