"""A worker process as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from compile_ext.warming.messages import Request, send, take

# Nothing is imported before the path is the parent's: the first on it is the working directory.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[1:-1];"
    " from compile_ext.warming.worker import main; main(int(sys.argv[-1]))"
)
_TAIL = 2000  # bytes of what a worker said last


class WorkerProcess:
    """Starts it, with the imports, the folder and the environment of this process.

    Args:
        devices: the ``CUDA_VISIBLE_DEVICES`` that it sees.

    Raises:
        OSError: it cannot be started: the environment is too large, there is no file descriptor
            or no process left.
    """

    def __init__(self, devices: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, as long as the process
        paths = [x for x in sys.path if isinstance(x, str)]  # Python passes over the others
        # Not multiprocessing, which runs the main module again: scripts without a guard are common.
        # A session of its own: Ctrl-C goes to the parent alone, and a kill to its children as well.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *paths, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": devices, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._buffer = bytearray()
        self.began = time.monotonic()

    def fileno(self) -> int:
        """Readable when there is a reply, or the process has ended."""
        return self._replies.fileno()

    @property
    def seconds(self) -> float:
        """Since the last request, or the start."""
        return time.monotonic() - self.began

    def ask(self, request: Request) -> bool:
        """Whether it could be asked: it may have died."""
        self.began = time.monotonic()
        try:
            send(self._requests, request)
        except BrokenPipeError:
            return False
        return True

    def reply(self) -> Any | None:
        """The next message, if all of it is here. Raises EOFError where it has ended."""
        data = os.read(self.fileno(), 2**16)
        if not data:
            raise EOFError
        self._buffer += data
        return take(self._buffer)

    @property
    def has_ended(self) -> bool:
        """A process that it has forked may hold its pipes, so that there is no end of them."""
        return _has_ended(self._process.pid)

    def end(self, grace: float = 0.0) -> str:
        """Kill it after ``grace`` seconds, with all that it has started.

        Returns what it died of, and what it said last.
        """
        pid, until = self._process.pid, time.monotonic() + grace
        while not _has_ended(pid) and time.monotonic() < until:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):  # where this process ignores SIGCHLD
            os.killpg(pid, signal.SIGKILL)  # not yet waited for: the id is still its own
        code = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()
        with self._errors:
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - _TAIL))
            said = self._errors.read().decode(errors="replace").strip()
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"{how}; it said last: {said.splitlines()[-1]}" if said else how


def _has_ended(pid: int) -> bool:
    options = os.WEXITED | os.WNOWAIT | os.WNOHANG
    try:
        return os.waitid(os.P_PID, pid, options) is not None
    except ChildProcessError:
        return True
