"""DeepGEMM, which runs its compiler from C++: the script of ``ops/deep_gemm_nvcc.py`` refuses a
compile, or notes it in a folder of the seal, and a byte says that it did.

A call through this package looks at the byte when it returns. A thread tells what other callers
have compiled, a moment later; they get an error of the library's where it was refused. Where
DeepGEMM does not compile through the script, its cache folder is watched in its place: nothing can
be refused then, only told, and what another process puts there is told too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import mmap
import os
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

from compile_ext.ops import deep_gemm_nvcc, deep_gemm_support
from compile_ext.ops.errors import SealError
from compile_ext.sealing.event import CompileEvent
from compile_ext.sealing.launches import launch_event
from compile_ext.sealing.telling import tell

log = logging.getLogger("compile_ext.seal")
_BYTE, _REFUSE = "noted", "refuse"  # files that the script knows
_POLL_SECONDS = 0.5
_LEFT_SECONDS = 2.0  # a note this old is of no call of this package, which would have taken it


class DeepGemmWatch:
    """On while a seal is."""

    def __init__(self) -> None:
        self.noted = memoryview(bytearray(1))
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._file: mmap.mmap | None = None
        self._stop = threading.Event()
        self._refuses = False
        self._known: set[str] = set()  # entries of the cache, where that is watched

    def set(self, *, is_on: bool, refuses: bool) -> None:
        """Nothing happens where DeepGEMM is not installed."""
        self._refuses = refuses
        if is_on and self._folder is None and importlib.util.find_spec("deep_gemm") is not None:
            self._begin()
        if self._folder is not None:
            refuse = self._folder / _REFUSE
            refuse.touch() if refuses else refuse.unlink(missing_ok=True)
            if not is_on:
                self._end(self._folder)

    def _begin(self) -> None:
        compiler = deep_gemm_support.nvcc()
        if compiler is not None:  # without importing the library, which takes a second
            deep_gemm_nvcc.stand_between(compiler)
        self._folder = Path(tempfile.mkdtemp(prefix="compile_ext_seal_"))
        with (self._folder / _BYTE).open("w+b") as file:
            file.write(b"\0")
            file.flush()
            self._file = mmap.mmap(file.fileno(), 1)
        self.noted = memoryview(self._file)
        self._known = _entries()
        os.environ[deep_gemm_nvcc.SEAL] = f"{os.getpid()}:{self._folder}"
        deep_gemm_nvcc.watcher = self
        self._stop = threading.Event()
        threading.Thread(
            target=self._poll, args=(self._stop,), name="compile_ext.seal", daemon=True
        ).start()

    def _end(self, folder: Path) -> None:
        self._stop.set()
        deep_gemm_nvcc.watcher = None
        os.environ.pop(deep_gemm_nvcc.SEAL, None)
        with self._lock:
            self._folder = None
        shutil.rmtree(folder, ignore_errors=True)

    def look(self, *, failed: bool) -> None:
        """Tell of what was compiled or refused, and not told yet.

        Args:
            failed: a call has failed to compile: under a seal that refuses, for that reason.
        """
        sources = self._take(older_than=0.0)
        if failed and self._refuses and not sources:
            sources = [""]  # the script could not write its note
        self._tell(sources)

    def _tell(self, sources: list[str]) -> None:
        errors: list[SealError] = []
        for source in sources:
            try:
                tell(lambda source=source: _event(source))  # type: ignore[misc]
            except SealError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _take(self, older_than: float) -> list[str]:
        """The sources of what was compiled or refused, each once."""
        latest = time.time() - older_than
        with self._lock:
            if self._folder is None:
                return []
            if older_than == 0.0:
                self.noted[0] = 0
            notes = [x for x in self._folder.glob("*.cu") if x.stat().st_mtime <= latest]
            sources = [x.read_text(errors="replace") for x in notes]
            for note in notes:
                note.unlink()
            if not deep_gemm_nvcc.stands_between():
                for name in sorted(_entries() - self._known):
                    source = deep_gemm_support.entries_folder() / name / "kernel.cu"
                    if source.exists() and source.stat().st_mtime <= latest:
                        self._known.add(name)
                        sources.append(source.read_text(errors="replace"))
        return list(dict.fromkeys(sources))

    def _poll(self, stop: threading.Event) -> None:
        while not stop.wait(_POLL_SECONDS):
            if not deep_gemm_nvcc.stands_between() and _entries() - self._known:
                self.noted[0] = 1  # the next call through this package tells of it
            try:
                self._tell(self._take(_LEFT_SECONDS))
            except SealError as error:
                log.error("%s", error)  # nobody to raise it to: the caller has had its own error


def _entries() -> set[str]:
    folder = deep_gemm_support.entries_folder()
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _event(source: str) -> CompileEvent:
    name = re.search(r"&\s*(\w+)\s*<", source)
    key = hashlib.sha256(source.encode()).hexdigest()[:32] if source else ""
    return launch_event("deep_gemm", name[1] if name else "a kernel", key, {})
