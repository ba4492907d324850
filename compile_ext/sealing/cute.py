"""CuTe DSL: ``cute.compile``, and the compile of a ``cute.jit`` function that is called as it is.
The first is refused before it is traced, the second once its trace is not in the cache.
Checked with CuTe DSL 4.8.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile_ext.ops import cute_compile
from compile_ext.ops.cute_kernel import CuteKernel
from compile_ext.sealing.calls import frames
from compile_ext.sealing.event import CompileEvent
from compile_ext.sealing.launches import launch_event
from compile_ext.sealing.patches import Patch
from compile_ext.sealing.telling import surfacing, tell

_NO_COMPILE = "compile_to_precompiled_mlir"  # gives the trace


def _watching_explicit(compile: Callable[..., Any]) -> Callable[..., Any]:
    def explicit(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get(_NO_COMPILE):
            tell(lambda: _event(_name(function), args))
        return compile(self, function, *args, **kwargs)

    _EXPLICIT.add(explicit.__code__)
    return explicit


def _watching_implicit(compile: Callable[..., Any]) -> Callable[..., Any]:
    def implicit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(frame.f_code in _EXPLICIT for frame in frames()):
            name = kwargs.get("original_function_name") or "a function"
            tell(lambda: _event(name, kwargs.get("full_args") or ()))
        return compile(self, *args, **kwargs)

    return implicit


_EXPLICIT: set[Any] = set()
# Of this package: a kernel that does not compile is given up, but not for a refusal.
_OWN, _OWN_LAUNCH = cute_compile.compile_cubin.__code__, CuteKernel._load.__code__
PATCHES = (
    Patch(cute_compile.__name__, "compile_cubin", surfacing),
    Patch("cutlass.base_dsl.compiler", "CompileCallable._compile", _watching_explicit),
    Patch("cutlass.base_dsl.dsl", "BaseDSL.compile_and_cache", _watching_implicit),
)


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _event(name: str, args: Any) -> CompileEvent:
    """Of a kernel of this package with its parameters and the key of its file."""
    key = ""
    for frame in frames():
        if frame.f_code is _OWN:
            name = f"{frame.f_locals['source']} {frame.f_locals['parameters']}"
        elif frame.f_code is _OWN_LAUNCH:
            key = frame.f_locals["key"].digest
            break
    arguments = {str(i): x for i, x in enumerate(args)}
    return launch_event("cute", name, key, arguments)
