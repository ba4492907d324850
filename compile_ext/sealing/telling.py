"""Who is told of a compile, and how a refusal gets past compilers that wrap or swallow errors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from compile_ext.ops.errors import SealError
from compile_ext.sealing.event import CompileEvent

Listener = Callable[[CompileEvent], object]
listeners: tuple[Listener, ...] = ()  # replaced as a whole: read without a lock


class _Thread(threading.local):
    is_telling = False  # what a callback compiles itself is not told
    depth = 0  # calls of `surfacing` functions
    refused: BaseException | None = None  # in the innermost of them


_THREAD = _Thread()


def tell(make: Callable[[], CompileEvent]) -> None:
    """Tell all listeners, and then raise what the first of them has raised, if one did: before the
    compile starts, where the caller can."""
    heard = listeners
    if _THREAD.is_telling or not heard:
        return
    _THREAD.is_telling = True
    try:
        event = make()
        errors = [e for listener in heard if (e := _raised(listener, event)) is not None]
    finally:
        _THREAD.is_telling = False
    if errors:
        if _THREAD.depth:
            _THREAD.refused = errors[0]
        raise errors[0]


def _raised(listener: Listener, event: CompileEvent) -> Exception | None:
    try:
        listener(event)
    # Of a user's callback, which may raise anything: raised once all have heard.
    except Exception as error:
        return error
    return None


def surfacing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a refusal inside ``function`` come out as it is: compilers wrap errors in their own, and
    Dynamo swallows them under ``suppress_errors``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, _THREAD.refused = _THREAD.refused, None
        _THREAD.depth += 1
        refused: BaseException | None = None
        result: Any = None
        try:
            result = function(*args, **kwargs)
            refused = _THREAD.refused
        except Exception as error:
            refused = _THREAD.refused or _sealed(error)
            if refused is None:
                raise
        finally:
            _THREAD.depth -= 1
            _THREAD.refused = (refused or before) if _THREAD.depth else None
        if refused is not None:
            raise refused from None
        return result

    return as_part_of(function, call)


def as_part_of(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Let the frames of a wrapper count as frames of the file that it wraps: for
    ``disable(recursive=False)`` Dynamo looks at the first one outside of its own."""
    code: Any = getattr(function, "__code__", None)
    if code is not None:
        own: Any = wrapper
        own.__code__ = own.__code__.replace(co_filename=code.co_filename)
    return wrapper


def _sealed(error: BaseException) -> SealError | None:
    """The refusal behind an error, that another thread may have raised."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, SealError):
            return found
        inner = getattr(found, "inner_exception", None)  # of Dynamo's and Inductor's errors
        found = inner or found.__cause__ or found.__context__
    return None
