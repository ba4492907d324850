"""Processes that are forked from the test's own, which has imported torch already: a start takes
10 ms and not 3 s, so that hundreds can be killed. What they run is the code that is shipped."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from compile_ext.warming import worker

SECONDS = 60.0  # none of the tests' processes takes 5 s: what takes this long hangs


class ForkedWorker:
    """In the place of ``subprocess.Popen`` in ``worker_process.py``."""

    def __init__(self, args: list[str], *, stderr: BinaryIO, env: Mapping[str, str], **_: Any):
        parent = int(args[-1])
        theirs_in, requests = os.pipe()
        replies, theirs_out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            if env["CUDA_VISIBLE_DEVICES"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            os.setsid()
            for number, fd in enumerate((theirs_in, theirs_out, stderr.fileno())):
                os.dup2(fd, number)
            _run(lambda: worker.main(parent), env)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(requests, "wb"), os.fdopen(replies, "rb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Fork:
    """A process that calls a function; its result, as JSON, comes through a file."""

    def __init__(self, call: Callable[[], Any], result: Path) -> None:
        self._result = result
        self.pid = os.fork()
        if self.pid == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            _run(lambda: result.write_text(json.dumps(call())), os.environ)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def status(self) -> int:
        """After it has ended. AssertionError where it hangs."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        self.kill()
        raise AssertionError(f"hangs after {SECONDS} s")

    def result(self) -> Any:
        assert self.status() == 0
        return json.loads(self._result.read_text())


def _run(call: Callable[[], Any], env: Mapping[str, str]) -> None:
    """Call it in a process that was forked, which ends then."""
    code = 0
    try:
        os.closerange(3, 4096)  # locks and pipes of the parent
        signal.signal(signal.SIGINT, signal.default_int_handler)
        variables = dict(env)
        os.environ.clear()
        os.environ.update(variables)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115, as long as the process
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        call()
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stderr.flush()
        os._exit(code)
