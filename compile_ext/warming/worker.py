"""A worker process: compiles units, one after another, until its parent closes the pipe.

It shares nothing with its parent but files and two pipes: what kills it costs one unit.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
import pickle
import shutil
import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from compile_ext.child_process import die_with_parent
from compile_ext.find_op import find
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target
from compile_ext.warming.messages import Ready, Reply, Request, receive, send
from compile_ext.warming.store import Store

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass
class Own:
    """What this process has in a folder of a compiler.

    Args:
        stage: its part of the stage. The same for all units: a library may read its name once.
        made: the entries that it has made so far.
        numbers: of its units.
    """

    stage: Path
    made: set[str] = field(default_factory=set)
    numbers: itertools.count[int] = field(default_factory=itertools.count)


def main(parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a compiler that reads finds the end
    os.dup2(2, 1)  # what a compiler prints goes with its errors
    owned: dict[Path, Own] = {}
    send(replies, Ready())
    with contextlib.ExitStack() as stages, contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            request: Request = receive(requests)
            send(replies, _answer(request, owned, stages))


def _answer(request: Request, owned: dict[Path, Own], stages: contextlib.ExitStack) -> Reply:
    start = time.perf_counter()
    try:
        _import(request)
        unit, target = pickle.loads(request.unit)
        store = Store(unit.compiler, request.folder)
        if request.folder not in owned:
            owned[request.folder] = Own(stages.enter_context(store.stage()))
        with store.key_lock(unit.key).acquire(timeout=request.lock_seconds):
            found = _compile(unit, target, store, owned[request.folder])
    except Exception as error:
        traceback.print_exc()
        return Reply(_reason(error, request.folder), False, time.perf_counter() - start)
    return Reply(None, found, time.perf_counter() - start)


def _compile(unit: CompileUnit, target: Target, store: Store, own: Own) -> bool:
    """Whether another process has compiled it in the meantime."""
    state = store.look(unit.key).state
    if state == "whole":
        return True
    if state == "damaged":
        store.discard(unit.key)
    stage = own.stage / str(next(own.numbers))
    stage.mkdir()
    try:
        unit.compiler.compile(unit, target, stage)
        own.made.update(store.install(unit, stage, own.made))
    finally:
        shutil.rmtree(stage, ignore_errors=True)  # else the next warmup removes it
    return False


def _import(request: Request) -> None:
    """Make the ops known that the unit's calls are of. Raises LookupError where one is not."""
    for module in request.modules:
        importlib.import_module(module)
    missing = find(request.ops, request.libraries, request.sources)
    if missing is not None:
        raise LookupError("op {} is not known here; tried: {}".format(*missing))


def _reason(error: Exception, folder: Path) -> str:
    from filelock import Timeout

    if isinstance(error, Timeout):
        return f"another process goes on holding {error.lock_file}"
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return f"no space left for {folder}: {error}"
    return f"{type(error).__name__}: {error}"
