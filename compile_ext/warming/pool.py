"""Run compile units on worker processes, whatever becomes of a worker."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.warming.messages import Reply, Request
from compile_ext.warming.results import UnitResult
from compile_ext.warming.worker_process import WorkerProcess

ATTEMPTS = 2  # a worker that dies may have been the victim of another process's memory
START_SECONDS = 300.0  # importing torch from a cold network disk takes a minute
HEARTBEAT = 1.0  # seconds after which it is looked whether the workers live
_GRACE = 5.0  # seconds for a process that is ending anyway


@dataclass
class Task:
    """A unit that waits, or is being compiled.

    Args:
        attempts: how many workers have begun it.
    """

    unit: CompileUnit
    request: Request
    note: str = ""
    attempts: int = 0

    @property
    def needs_device(self) -> bool:
        return self.unit.compiler.needs_device


@dataclass(frozen=True)
class Limits:
    """How much of the machine to use.

    Args:
        jobs: worker processes; device_jobs: of those, how many may use the GPU.
        unit_seconds: after which a unit has failed.
        until: no unit is begun after this value of ``time.monotonic``; late: and the reason.
    """

    jobs: int
    device_jobs: int
    unit_seconds: float
    until: float | None = None
    late: str = ""


@dataclass
class _Worker:
    process: WorkerProcess
    sees_device: bool
    task: Task | None = None
    is_ready: bool = False


@dataclass
class Pool:
    """One run over some tasks, in their order.

    Args:
        devices: the ``CUDA_VISIBLE_DEVICES`` of workers that use a GPU.
        done: called with each result as it comes.
    """

    tasks: list[Task]
    limits: Limits
    devices: str
    done: Callable[[UnitResult], None]
    _workers: list[_Worker] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    # By whether they see the GPU: without one that did not fail in between.
    _starts_failed: Counter[bool] = field(default_factory=Counter)

    def run(self) -> None:
        """Leaves no process behind, also when it is interrupted."""
        try:
            while self.tasks or self._busy():
                self._skip_late_tasks()
                self._assign()
                self._wait()
        finally:
            # Killed: nothing of theirs is unfinished, and a process that has used CUDA takes a
            # second to end by itself.
            for worker in list(self._workers):
                self._end(worker)
            self._selector.close()

    def _busy(self) -> bool:
        return any(x.task is not None for x in self._workers)

    def _skip_late_tasks(self) -> None:
        until = self.limits.until
        if until is not None and time.monotonic() >= until:
            for task in self.tasks:
                self.done(UnitResult(task.unit, "skipped", reason=self.limits.late))
            self.tasks.clear()

    def _assign(self) -> None:
        """Give each free worker the first task that it can do, and start workers for the rest. A
        start takes as long as a kernel: so a worker sees the GPU as long as that may have more of
        them and a task is left that needs it, and does what comes."""
        for worker in [x for x in self._workers if x.task is None]:
            self._give_next(worker)
        while self.tasks and len(self._workers) < self.limits.jobs:
            with_device = sum(x.sees_device for x in self._workers)
            more = with_device < self.limits.device_jobs
            sees_device = more and any(x.needs_device for x in self.tasks)
            if not sees_device and all(x.needs_device for x in self.tasks):
                return
            started = self._start(sees_device)
            if started is None:
                return
            self._give_next(started)

    def _give_next(self, worker: _Worker) -> None:
        mine = (x for x in self.tasks if worker.sees_device or not x.needs_device)
        task = next(mine, None)
        if task is not None:
            self._give(worker, task)

    def _give(self, worker: _Worker, task: Task) -> None:
        self.tasks.remove(task)
        worker.task = task
        if worker.is_ready:
            self._ask(worker)

    def _start(self, sees_device: bool) -> _Worker | None:
        """None where the system lets no more start: those that are there go on."""
        try:
            process = WorkerProcess(self.devices if sees_device else "")
        except OSError as error:
            if not any(x.sees_device == sees_device for x in self._workers):
                self._give_up(f"a worker did not start: {error}")
            return None
        worker = _Worker(process, sees_device)
        self._workers.append(worker)
        self._selector.register(worker.process, selectors.EVENT_READ, worker)
        return worker

    def _ask(self, worker: _Worker) -> None:
        task = worker.task
        assert task is not None
        task.attempts += 1
        if not worker.process.ask(task.request):
            self._died(worker)

    def _wait(self) -> None:
        """Until something happens to a worker."""
        ended = [x for x in self._workers if x.process.has_ended]  # what it said is in its pipe
        for key, _ in self._selector.select(self._patience()):
            worker: _Worker = key.data
            try:
                message = worker.process.reply()
            except EOFError:
                self._died(worker)
                continue
            if isinstance(message, Reply):
                self._finished(worker, message)
            elif message is not None:
                worker.is_ready = True
                self._starts_failed[worker.sees_device] = 0
                if worker.task is not None:
                    self._ask(worker)
        for worker in ended:
            if worker in self._workers:
                self._died(worker)
        for worker in list(self._workers):
            if worker.task is not None and worker.process.seconds > self._allowed(worker):
                self._timed_out(worker)

    def _patience(self) -> float:
        """Seconds until the first worker takes too long."""
        left = [self._allowed(x) - x.process.seconds for x in self._workers if x.task is not None]
        if self.tasks and self.limits.until is not None:
            left.append(self.limits.until - time.monotonic())
        return max(0.0, min(HEARTBEAT, *left)) if left else 0.0

    def _allowed(self, worker: _Worker) -> float:
        return self.limits.unit_seconds if worker.is_ready else START_SECONDS

    def _finished(self, worker: _Worker, reply: Reply) -> None:
        task, worker.task = worker.task, None
        assert task is not None
        if reply.failure is not None:
            self._fail(task, reply.failure, reply.seconds)
        elif reply.found:
            self.done(UnitResult(task.unit, "cached"))
        else:
            self.done(UnitResult(task.unit, "compiled", reply.seconds, task.note))

    def _died(self, worker: _Worker) -> None:
        """The task gets another worker, once. It waits behind the others: what has killed the
        worker may be the memory that they need."""
        seconds, task = worker.process.seconds, worker.task
        how = f"its worker {self._end(worker, _GRACE)}"
        if not worker.is_ready:
            how = f"a worker did not start: it {how.removeprefix('its worker ')}"
            self._starts_failed[worker.sees_device] += 1
            if task is not None:
                task.attempts += 1
        if task is not None:
            if task.attempts < ATTEMPTS:
                task.note = "; ".join(x for x in (task.note, how) if x)
                self.tasks.append(task)
            else:
                self._fail(task, how, seconds)
        alike = [x for x in self._workers if x.sees_device == worker.sees_device]
        if not alike and self._starts_failed[worker.sees_device] >= ATTEMPTS:
            self._give_up(how)

    def _give_up(self, how: str) -> None:
        """Workers of a kind do not start: fail what no other kind can do."""
        for task in [x for x in self.tasks if x.needs_device or not self._workers]:
            self.tasks.remove(task)
            self._fail(task, how, 0.0)

    def _timed_out(self, worker: _Worker) -> None:
        task, seconds = worker.task, worker.process.seconds
        assert task is not None
        self._end(worker)
        self._fail(task, f"took longer than {self._allowed(worker):g} s", seconds)

    def _fail(self, task: Task, reason: str, seconds: float) -> None:
        self.done(UnitResult(task.unit, "failed", seconds, reason))

    def _end(self, worker: _Worker, grace: float = 0.0) -> str:
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.process)
        self._workers.remove(worker)
        return worker.process.end(grace)
