"""The child process: it finds the op, and runs it as often as it is asked to.

Nothing of it is shared with the parent but files: a kernel that writes where it must not can break
this process, and no more.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload

from compile_ext.child_process import die_with_parent
from compile_ext.find_op import Source, find
from compile_ext.ops.call_site import find_overload
from compile_ext.testing.memory import copied, tensors_in
from compile_ext.testing.process.messages import Done, Raised, Request, pack, unpack


@dataclass(frozen=True)
class Setup:
    """What the child needs to know of its parent.

    Args:
        is_fork: it has the parent's memory, but not its threads.
        parent: the parent's process id.
        ops: names of the overloads that it will be asked to run.
        path: the parent's ``sys.path``; libraries: those with ops that it loaded.
        sources: modules that may define the ops.
    """

    is_fork: bool
    parent: int
    ops: tuple[str, ...]
    path: tuple[str, ...]
    libraries: tuple[str, ...]
    sources: tuple[Source, ...]


def serve(connection: Connection, others_end: Connection, setup: Setup, folder: str) -> None:
    """Answer requests until the parent goes."""
    die_with_parent(setup.parent)
    others_end.close()  # or this process would never see that the parent is gone
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers Ctrl-C
    if setup.is_fork:
        torch.set_num_threads(1)  # OpenMP's threads did not survive the fork
    sys.path[:] = setup.path
    connection.send(find(setup.ops, setup.libraries, setup.sources))
    with contextlib.suppress(EOFError):
        while True:
            request: Request = connection.recv()
            connection.send(_answer(request, folder))


def _answer(request: Request, folder: str) -> Done | Raised:
    try:
        arguments = unpack(request.arguments, request.file, to_devices=True)
        op = find_overload(request.op)
        with torch.inference_mode(False), torch.no_grad():
            torch.manual_seed(0)  # an op may draw random numbers: the same in each run
            if request.kind == "fake":
                return Done(_run_fake(op, arguments), {})
            if request.late:
                results, arguments, note = _run_late(op, arguments, request.late)
            else:
                results, note = call(op, arguments), ""
        synchronize(arguments)
        return _done(results, arguments, note, f"{folder}/results.pt")
    except Exception as error:
        return _raised(error)


def call(op: OpOverload, arguments: dict[str, Any]) -> Any:
    """``arguments``: all of them, by schema name."""
    schema = op._schema.arguments
    args = [arguments[a.name] for a in schema if not a.kwarg_only]
    return op(*args, **{a.name: arguments[a.name] for a in schema if a.kwarg_only})


def _run_late(
    op: OpOverload, arguments: dict[str, Any], late: str
) -> tuple[Any, dict[str, Any], str]:
    try:
        from compile_ext.testing.process.racy_producer import run_behind_producer
    except ImportError as error:
        return call(op, arguments), arguments, f"needs Triton: {error}"
    return run_behind_producer(op, arguments, late)


def synchronize(tree: Any) -> None:
    for device in {x.device for x in tensors_in(tree) if x.is_cuda}:
        torch.cuda.synchronize(device)


def _run_fake(op: OpOverload, arguments: dict[str, Any]) -> list[str]:
    """dtype, shape, strides and device of each result, as texts."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def form(x: Any) -> str:
        if not isinstance(x, Tensor):
            return repr(x)
        return f"{x.dtype} {list(x.shape)}, strides {list(x.stride())}, on {x.device}"

    with FakeTensorMode() as mode:
        fakes = pytree.tree_map(
            lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, arguments
        )
        return [form(x) for x in pytree.tree_leaves(call(op, fakes))]


def _done(results: Any, arguments: dict[str, Any], note: str, file: str) -> Done:
    for x in tensors_in(results):
        if x.layout != torch.strided:
            raise TypeError(f"check_contract compares strided tensors; a result is {x.layout}")
    plain = pytree.tree_map(
        lambda x: x.detach().resolve_conj().resolve_neg() if isinstance(x, Tensor) else x, results
    )
    both = [plain, arguments]
    if any(x.device.type != "cpu" for x in tensors_in(both)):
        both = copied(both, lambda x: "cpu")
    results, arguments = pack(both, ["cpu"] * len(tensors_in(both)), file)
    return Done(results, arguments, file, note)


def _raised(error: Exception) -> Raised:
    trace = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__}: {error}"
    try:
        # Some errors pickle, and fail to come back.
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Raised(None, text, trace)
    return Raised(error, text, trace)
