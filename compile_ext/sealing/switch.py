"""``seal``: a switch for the whole process, and what it does when something is compiled."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from compile_ext.ops.errors import ArgumentError
from compile_ext.sealing import cute, dynamo, inductor, telling, triton
from compile_ext.sealing.deep_gemm import DeepGemmWatch
from compile_ext.sealing.event import CompileEvent
from compile_ext.sealing.patches import Patches

log = logging.getLogger("compile_ext.seal")

Action = Literal["error", "warn"] | Callable[[CompileEvent], object]
_LOCK = threading.RLock()
_PATCHES = Patches((*triton.PATCHES, *cute.PATCHES, *inductor.PATCHES, *dynamo.PATCHES))
_DEEP_GEMM = DeepGemmWatch()
_on: list[Seal] = []


class Seal:
    """Made by :func:`seal`: off at first; a context manager, or a switch."""

    def __init__(self, action: Action) -> None:
        self._action = action
        self._depth = 0  # of `with`, where one seal is used in itself
        self._was_on = False  # before the outermost of them

    def on(self) -> None:
        """From now on each compile is told. Nothing happens where it is on already."""
        with _LOCK:
            if self not in _on:
                _on.append(self)
                if len(_on) == 1:
                    _PATCHES.put_in()
                _set_listeners()

    def off(self) -> None:
        """Nothing happens where it is off already. With the last seal every hook is taken out."""
        with _LOCK:
            if self in _on:
                _on.remove(self)
                _set_listeners()
                if not _on:
                    _PATCHES.take_out()

    def __enter__(self) -> Seal:
        with _LOCK:
            if self._depth == 0:
                self._was_on = self in _on
            self._depth += 1
            self.on()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _LOCK:
            self._depth -= 1
            is_last = self._depth == 0 and not self._was_on
        if is_last:
            try:
                if error is None:
                    _DEEP_GEMM.look(failed=False)  # what it has compiled last, and told nobody
            finally:
                self.off()

    def hear(self, event: CompileEvent) -> None:
        if callable(self._action):
            self._action(event)
        elif self._action == "error":
            raise event.error()
        else:
            log.warning("%s", event)

    @property
    def refuses(self) -> bool:
        return self._action == "error"


def seal(action: Action) -> Seal:
    """Report or refuse what is compiled from now on, by Triton, CuTe DSL, DeepGEMM, Inductor or
    Dynamo, in this process, whoever asks for it. To load what was compiled before is no compile.

        with compile_ext.seal("error"):
            serve(model)

        s = compile_ext.seal("warn")
        s.on(); ...; s.off()

    Costs a call nothing where nothing is compiled, but for DeepGEMM one look at a byte. Several may
    be on at once: each hears of all, and one that refuses is enough.

    Args:
        action: ``"error"``: raise a :class:`SealError` in place of the compile; the call can be
            repeated once the seal is lifted. ``"warn"``: a line in the log ``compile_ext.seal``. Or
            a function that gets the :class:`CompileEvent`, in the thread that compiles; what it
            raises comes through in place of the compile.

    Raises:
        ArgumentError: ``action`` is none of these.
    """
    if not callable(action) and action not in ("error", "warn"):
        wanted = '"error", "warn" or a function'
        raise ArgumentError("seal", repr(action), wanted, 'e.g. seal("error")')
    return Seal(action)


def _set_listeners() -> None:
    telling.listeners = tuple(s.hear for s in _on)
    _DEEP_GEMM.set(is_on=bool(_on), refuses=any(s.refuses for s in _on))
