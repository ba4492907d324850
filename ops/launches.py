"""What kernels would launch for a call, found by running their host code on tensors of the device
``meta``: no data, no GPU, nothing compiled."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from compile_ext.ops import device
from compile_ext.ops.compile_unit import Compiler


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel that is compiled when it is first launched.

    Args:
        compiler: what compiles it.
        kernel: its name, for people.
        made_from: all that the compiled kernel depends on, by name.
        how: what the compiler needs to compile it: its own affair.
        seconds: about how long that takes, of one core.
    """

    compiler: Compiler
    kernel: str
    made_from: tuple[tuple[str, str], ...]
    how: Any = field(compare=False, default=None)
    seconds: float = field(compare=False, default=1.0)

    @functools.cached_property
    def key(self) -> str:
        """The same in each process."""
        text = json.dumps([self.compiler.name, self.kernel, *self.made_from])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


_NOTED: ContextVar[list[Launch] | None] = ContextVar("compile_ext_launches", default=None)


def recorder() -> list[Launch] | None:
    """Where a launch of this thread is noted in the place of being made; None: it is made."""
    return _NOTED.get()


@contextmanager
def recording(target: device.Target) -> Iterator[list[Launch]]:
    """Inside, in this thread, launches are noted, as a GPU like ``target`` would get them.

    Kernels run on tensors of the device ``meta`` there.
    """
    from compile_ext.ops import triton_compiler  # which itself notes launches here

    noted: list[Launch] = []
    token = _NOTED.set(noted)
    try:
        with device.as_if_on(target), triton_compiler.noting():
            yield noted
    finally:
        _NOTED.reset(token)
