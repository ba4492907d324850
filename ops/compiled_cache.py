"""Compiled kernels on disk: a file each, found by what it was made from, checked when it is read.

A file is a line with the SHA-256 of all that follows it, a line with the key, and the kernel. It is
written under another name and then renamed, so that nobody reads half of one; what a power cut or
a full disk leaves of it does not fit its checksum, and is compiled anew. One process of a host
compiles a key: the others wait for it (``flock``, which dies with its process). A folder that takes
no file costs the cache, not the kernel.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compile_ext.ops import cache_folder

log = logging.getLogger(__name__)

# No compilation takes this long (CuTe DSL: 1 to 5 s): who still holds the lock then is stuck.
LOCK_SECONDS = 300.0


@dataclass(frozen=True)
class Key:
    """What a compiled kernel is found by.

    Args:
        kernel: the name of its source; for people, and part of the file's name.
        made_from: all that the result depends on, by name, but for the compiler.
        compiler: its name and release; None where none is installed, and any will do.
    """

    kernel: str
    made_from: tuple[tuple[str, str], ...]
    compiler: str | None

    @functools.cached_property
    def text(self) -> str:
        """A line of JSON. The same in each process."""
        return json.dumps({"kernel": self.kernel, **dict(self.made_from)}, sort_keys=True)

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:32]

    def pattern(self) -> str:
        """Of the file's name. The compiler is in the name and not in the digest, so that a host
        without one finds what another host has compiled."""
        compiler = "*" if self.compiler is None else re.sub(r"[^\w.+-]", "_", self.compiler)
        return f"{self.kernel}-{self.digest}-{compiler}.bin"


def folder() -> Path:
    return cache_folder.cache_folder() / "kernels"


def find(key: Key) -> bytes | None:
    """The kernel, if a file has it whole. A file that is damaged is named in a warning."""
    if key.compiler is not None:
        return _read(folder() / key.pattern(), key)
    files = sorted(folder().glob(key.pattern()), reverse=True)  # the newest release first, mostly
    return next((x for x in (_read(file, key) for file in files) if x is not None), None)


def obtain(key: Key, compile: Callable[[], bytes]) -> tuple[bytes, bool]:
    """The kernel, and whether ``compile`` had to make it. Keeps it, where the folder takes it.

    Args:
        key: with a compiler.
        compile: what it raises comes through; nothing is kept then.
    """
    found = find(key)
    if found is not None:
        return found, False
    path = folder() / key.pattern()
    with _locked(path) as locked:
        found = find(key)  # of the process that held the lock
        if found is not None:
            return found, False
        made = compile()
        if locked:
            try:
                write(path, key, made)
            except OSError as error:
                _cannot_keep(path.parent, str(error))
    return made, True


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the key's lock, and say whether that worked. Without it several processes may compile
    the same, and none of them writes."""
    from filelock import FileLock, Timeout  # not at import time: only where something is compiled

    lock = FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        said = "%s: held for %.0f s: compiled here as well, for this process alone"
        log.warning(said, lock.lock_file, LOCK_SECONDS)
        yield False
        return
    except (OSError, NotImplementedError) as error:
        _cannot_keep(path.parent, str(error))
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def write(path: Path, key: Key, kernel: bytes) -> None:
    """Make or replace a file of the cache in one step. Raises OSError where the disk is full."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):  # of a process that was killed
        left.unlink(missing_ok=True)
    content = key.text.encode() + b"\n" + kernel
    checksum = hashlib.sha256(content).hexdigest().encode()
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        # Not by tempfile: its files are for this user only, and an image is often built by another
        # one than runs it.
        with temporary.open("xb") as file:
            file.write(checksum + b"\n" + content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, key: Key) -> bytes | None:
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        log.warning("%s: cannot be read (%s)", path, error)
        return None
    checksum, _, content = data.partition(b"\n")
    text, _, kernel = content.partition(b"\n")
    if checksum != hashlib.sha256(content).hexdigest().encode():
        log.warning("%s: damaged (its checksum does not fit): not used", path)
        return None
    if text != key.text.encode():
        log.warning("%s: holds another kernel than its name says: not used", path)
        return None
    return kernel


@functools.cache
def _cannot_keep(place: Path, reason: str) -> None:
    """Said once in a process."""
    log.warning(
        "%s takes no compiled kernels (%s): each process compiles them anew; %s names another"
        " folder",
        place,
        reason,
        cache_folder.VARIABLE,
    )
