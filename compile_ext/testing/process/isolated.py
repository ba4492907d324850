"""A child process that runs the op: the parent survives what a kernel does, and names the run.

CPU tensors alone: the child is forked, so that ops that a test function or a notebook defined are
there. A CUDA context does not survive a fork: with CUDA tensors the child starts anew, and imports
what defines the op.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from compile_ext.find_op import Source
from compile_ext.ops.errors import ContractError
from compile_ext.testing.process.child import Setup, serve
from compile_ext.testing.process.messages import Done, Raised, Request, pack, unpack

_START = "start of the child process"


@dataclass(frozen=True)
class Outcome:
    """One run: what it returned, and all arguments as they were afterwards, on the CPU."""

    results: Any
    arguments: dict[str, Any]
    note: str


class Isolated:
    """The child, for one call of ``check_contract``; leave the ``with`` block to end it.

    Raises:
        ContractError: the child died or ran out of time (``seconds``) in a run, which is named, or
            at its start; or it does not know an op.
    """

    def __init__(
        self,
        where: str,
        ops: list[OpOverload],
        sources: list[Source],
        *,
        fork: bool,
        seconds: float,
    ) -> None:
        self._where, self._seconds, self._is_fork = where, seconds, fork
        self._folder = tempfile.TemporaryDirectory(prefix="compile_ext_contract_")
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self._connection, self._theirs = context.Pipe()
        names = tuple(_name(op) for op in ops)
        libraries = tuple(map(str, torch.ops.loaded_libraries))
        setup = Setup(fork, os.getpid(), names, tuple(sys.path), libraries, tuple(sources))
        self._process = context.Process(
            target=serve,
            args=(self._theirs, self._connection, setup, self._folder.name),
            daemon=True,
        )
        self.runs = 0
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        with warnings.catch_warnings():
            # The child of a fork uses no lock that a thread of ours may hold: it runs torch alone.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        self._theirs.close()  # or a child that dies would look like one that is busy
        self._refuse_missing(self._receive(_START))

    def __enter__(self) -> Isolated:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child, and remove its files."""
        self._connection.close()
        self._theirs.close()
        if self._process.pid is not None:  # it was started
            self._process.join(1)
            if self._process.exitcode is None:
                self._process.kill()
                self._process.join()
        self._process.close()
        self._folder.cleanup()

    def run(
        self,
        label: str,
        op: OpOverload,
        arguments: dict[str, Any],
        devices: list[str],
        late: str = "",
    ) -> Outcome | Raised:
        """Run ``op`` on copies of ``arguments`` (CPU tensors, by schema name), which lie on
        ``devices`` there; ``late`` as in ``Request``."""
        self.runs += 1
        reply = self._ask(label, op, arguments, devices, "run", late)
        if isinstance(reply, Raised):
            return reply
        both = [reply.results, reply.arguments]
        results, after = unpack(both, reply.file, to_devices=False)
        return Outcome(results, after, reply.note)

    def fake(
        self, label: str, op: OpOverload, arguments: dict[str, Any], devices: list[str]
    ) -> list[str] | Raised:
        """What the op's fake says of its results."""
        reply = self._ask(label, op, arguments, devices, "fake")
        return reply if isinstance(reply, Raised) else list(reply.results)

    def _ask(
        self,
        label: str,
        op: OpOverload,
        arguments: dict[str, Any],
        devices: list[str],
        kind: Literal["run", "fake"],
        late: str = "",
    ) -> Done | Raised:
        file = f"{self._folder.name}/arguments.pt"
        request = Request(_name(op), pack(arguments, devices, file), file, kind, late)
        try:
            self._connection.send(request)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death(label) from None
        reply: Done | Raised = self._receive(label)
        return reply

    def _receive(self, label: str) -> Any:
        try:
            if self._connection.poll(self._seconds):
                return self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death(label) from None
        self._process.kill()
        found = f"{label}: no answer after {self._seconds:g} seconds"
        wanted, fix = (
            "an op that comes to an end",
            "mend the op, take smaller inputs, or pass a larger",
        )
        if label == _START:
            wanted, fix = "a child process that starts", "pass a larger"
        elif self._is_fork:  # it would wait for OpenMP's threads, which are the parent's alone
            found += (
                ": an op that asks for more than one OpenMP thread never ends in a forked child"
            )
        raise ContractError(self._where, found, wanted, f"{fix} timeout=")

    def _death(self, label: str) -> ContractError:
        self._process.join(10)
        code = self._process.exitcode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        found = f"{label}: the process died with {how}"
        if label == _START:
            fix = "see stderr; in a script, call it below `if __name__ == '__main__':`"
            return ContractError(self._where, found, "a child process that starts", fix)
        found += ": the op touched memory that it must not, or ended the process"
        return ContractError(self._where, found, "an op that returns", "mend the op")

    def _refuse_missing(self, missing: tuple[str, str] | None) -> None:
        if missing is not None:
            raise ContractError(
                self._where,
                f"no {missing[0]} in the child process, which imported {missing[1]}",
                "a module that defines the op when it is imported",
                'pass imports=("module",), with the module that defines it at its top level',
            )


def _name(op: OpOverload) -> str:
    return f"{op._schema.name}.{op._overloadname}"
