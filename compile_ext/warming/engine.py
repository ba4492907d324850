"""Compile units that are not on disk, each once on this host."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from compile_ext.ops.compile_unit import Compiler, CompileUnit
from compile_ext.ops.device import Target
from compile_ext.warming.capacity import Capacity, capacity
from compile_ext.warming.pool import Limits, Pool, Task
from compile_ext.warming.progress import Progress
from compile_ext.warming.results import UnitResult
from compile_ext.warming.sources import request_for
from compile_ext.warming.store import Store

UNIT_SECONDS = 600.0  # nvcc takes 3 to 6 s for a kernel: what takes this long is stuck


@dataclass(frozen=True)
class Warmed:
    """What ``Engine.run`` returns.

    Args:
        results: of each unit of this warmup so far, in the order in which they came.
        capacity: how many workers there were; None where nothing had to be compiled.
        folders: compiler -> where its kernels lie.
    """

    results: tuple[UnitResult, ...]
    capacity: Capacity | None
    folders: Mapping[str, Path]


class Engine:
    """One warmup.

    Args:
        target: what to compile for; None where nothing will be.
        jobs: most worker processes; None: as many as the machine takes.
        budget_seconds: after which no unit is begun, counted from ``start``.
        start: of the warmup, by the monotonic clock.
        progress: told of what happens.
        load: makes the result of a kernel that is on disk; called while others are compiled.
    """

    def __init__(
        self,
        target: Target | None,
        *,
        jobs: int | None,
        budget_seconds: float | None,
        start: float,
        progress: Progress,
        load: Callable[[UnitResult], UnitResult] | None = None,
    ) -> None:
        self._given, self._jobs, self._progress, self._load = target, jobs, progress, load
        self._budget = budget_seconds
        self._until = None if budget_seconds is None else start + budget_seconds
        self._wanted: dict[CompileUnit, None] = {}
        self._results: dict[CompileUnit, UnitResult] = {}
        self._stores: dict[str, Store | str] = {}
        self._capacity: Capacity | None = None

    def run(self, units: Iterable[CompileUnit]) -> Warmed:
        """Compile what no earlier run of this warmup has tried."""
        self._wanted |= dict.fromkeys(units)
        left = self._without_cached(x for x in self._wanted if x not in self._results)
        with contextlib.ExitStack() as locks:
            left = self._locked(left, locks)
            if left:
                self._compile(self._without_cached(left))
        results = tuple(self._results[unit] for unit in self._wanted)
        stores = {k: x.folder for k, x in self._stores.items() if isinstance(x, Store)}
        return Warmed(results, self._capacity, stores)

    @property
    def _target(self) -> Target:
        assert self._given is not None  # without one there are no units
        return self._given

    def _store(self, compiler: Compiler) -> Store | str:
        """The folder of a compiler, or why there is none."""
        if compiler.name not in self._stores:
            try:
                # Absolute: a compiler may change the working directory of its worker.
                self._stores[compiler.name] = Store(compiler, compiler.folder().absolute())
            except ImportError as error:
                reason = compiler.why_not(self._target)
                self._stores[compiler.name] = reason or str(error)
        return self._stores[compiler.name]

    def _without_cached(self, units: Iterable[CompileUnit]) -> list[CompileUnit]:
        left = []
        for unit in units:
            store = self._store(unit.compiler)
            if isinstance(store, str):
                self._note(UnitResult(unit, "skipped", reason=store))
            elif store.look(unit.key).state == "whole":
                self._note(UnitResult(unit, "cached"))
            else:
                left.append(unit)
        return left

    def _locked(self, units: list[CompileUnit], locks: contextlib.ExitStack) -> list[CompileUnit]:
        """The units whose folder takes files, and is this process's alone until ``locks`` end."""
        by_folder: dict[Path, list[tuple[CompileUnit, Store]]] = {}
        for unit in units:
            store = self._stores[unit.compiler.name]
            assert isinstance(store, Store)
            by_folder.setdefault(store.folder, []).append((unit, store))
        left: set[CompileUnit] = set()
        for folder in sorted(by_folder):  # the same order in each process: no deadlock
            mine = by_folder[folder]
            store = mine[0][1]  # compilers may share a folder
            try:
                store.prepare()
                self._wait_for(store.pool_lock(), folder, locks)
            except Timeout:
                for unit, _ in mine:
                    self._note(UnitResult(unit, "skipped", reason=late(self._budget)))
            except OSError as error:
                reason = f"{folder} takes no file: {error.strerror or error}"
                for unit, store in mine:
                    damaged = store.look(unit.key).reason
                    also = f"; {damaged}" if damaged else ""
                    self._note(UnitResult(unit, "failed", reason=reason + also))
            else:
                store.remove_left_stages()
                left.update(unit for unit, _ in mine)
        return [unit for unit in units if unit in left]

    def _wait_for(self, lock: FileLock, folder: Path, locks: contextlib.ExitStack) -> None:
        """Until no other warmup of this host uses the folder. The lock of one that dies is free."""
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._progress.say(f"waiting for another warmup of {folder}")
            left = -1.0 if self._until is None else max(0.0, self._until - time.monotonic())
            lock.acquire(timeout=left)
        locks.callback(lock.release)

    def _compile(self, units: list[CompileUnit]) -> None:
        tasks = [task for unit in units if (task := self._task(unit)) is not None]
        if not tasks:
            return
        self._capacity = capacity([task.unit for task in tasks], self._jobs)
        limits = Limits(
            self._capacity.jobs,
            self._capacity.device_jobs,
            UNIT_SECONDS,
            self._until,
            late(self._budget),
        )
        self._progress.begin(len(tasks))
        try:
            Pool(tasks, limits, visible_devices(), self._done).run()
        finally:
            for store in self._stores.values():
                if isinstance(store, Store):
                    store.remove_left_stages()  # of workers that died

    def _task(self, unit: CompileUnit) -> Task | None:
        """None where it cannot be compiled here, which is noted."""
        store = self._stores[unit.compiler.name]
        assert isinstance(store, Store)
        found = store.look(unit.key)
        note = ""
        if found.state == "damaged":
            note = f"was damaged: {found.reason}"
            try:
                store.discard(unit.key)
            except OSError as error:
                left = f"{note}; it cannot be removed: {error}"
                self._note(UnitResult(unit, "failed", reason=left))
                return None
        reason = unit.compiler.why_not(self._target)
        if reason is not None:
            both = f"{reason}; {note}" if note else reason
            self._note(UnitResult(unit, "skipped", reason=both))
            return None
        try:
            request = request_for(unit, self._target, store.folder, UNIT_SECONDS)
        except Exception as error:  # of pickle, or of a module of another package
            reason = f"cannot be sent to a worker: {type(error).__name__}: {error}"
            self._note(UnitResult(unit, "failed", reason=reason))
            return None
        return Task(unit, request, note)

    def _done(self, result: UnitResult) -> None:
        self._progress.done(self._note(result))

    def _note(self, result: UnitResult) -> UnitResult:
        if self._load is not None and result.status in ("compiled", "cached"):
            result = self._load(result)
        self._results[result.unit] = result
        return result


def late(budget: float | None) -> str:
    """Why a unit is not begun any more."""
    return "" if budget is None else f"the time budget of {budget:g} s"


def visible_devices() -> str:
    """``CUDA_VISIBLE_DEVICES`` of a worker that uses the GPU of this process."""
    if not torch.cuda.is_available():
        return ""
    index = torch.cuda.current_device()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[index].strip() if given else str(index)
