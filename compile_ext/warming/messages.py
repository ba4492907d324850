"""What a worker process and its parent say to each other: a length of 8 bytes, and a pickle."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compile_ext.find_op import Source

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Request:
    """Compile a unit.

    Args:
        unit: a pickled (CompileUnit, Target), apart, so that a module that is missing costs this
            unit alone.
        folder: of the unit's compiler, as the parent sees it.
        ops: names of the overloads that the unit's calls need; libraries, sources: what may define
            them; modules: to import first, since they say what the ops compile.
        lock_seconds: how long another process may hold the unit's lock.
    """

    unit: bytes
    folder: Path
    ops: tuple[str, ...]
    libraries: tuple[str, ...]
    sources: tuple[Source, ...]
    modules: tuple[str, ...]
    lock_seconds: float


@dataclass(frozen=True)
class Ready:
    """A worker has started."""


@dataclass(frozen=True)
class Reply:
    """What became of a unit: None is a success.

    Args:
        found: whether another process had compiled it meanwhile.
        seconds: wall time of the compilation.
    """

    failure: str | None
    found: bool
    seconds: float


def send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message; blocks. Raises EOFError at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(head)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


def take(buffer: bytearray) -> Any | None:
    """The first message of what has been read so far, which leaves the buffer; or None."""
    if len(buffer) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack_from(buffer)
    end = _LENGTH.size + size
    if len(buffer) < end:
        return None
    message = pickle.loads(bytes(buffer[_LENGTH.size : end]))
    del buffer[:end]
    return message
