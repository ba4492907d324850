"""The child process: the op kills it, hangs in it, raises in it, or is not there."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext import find_op
from compile_ext.ops import OpContract, router_gemm_m1
from compile_ext.ops.errors import ChildTrace, CompileExtError, ContractError, RankError
from compile_ext.testing import ClaimError, check_contract
from compile_ext.testing.process import isolated
from compile_ext.testing.process.isolated import Isolated, Outcome

SCHEMA = "op(Tensor x, Tensor? y) -> Tensor"
UNREAD = OpContract(unread={"y": lambda **_: True})
X = torch.arange(6.0)


def test_a_segmentation_fault_in_a_poisoned_run(define, assert_false):
    def crashes(x: Tensor, y: Tensor | None) -> Tensor:
        if y is not None and y.isinf().any():
            faulthandler.disable()  # pytest's would print a trace, of what is meant to happen
            ctypes.string_at(0)
        return x + 1

    op = define(SCHEMA, crashes, UNREAD)
    found = r"'y'\]: argument 'y' filled with Inf: the process died with SIGSEGV: the op touched"
    assert_false(op, (X, torch.ones(1)), found, "an op that returns", "mend the op")


def test_a_child_that_ends_in_the_clean_run(define, assert_false):
    op = define(SCHEMA, lambda x, y: os._exit(3), UNREAD)
    assert_false(op, (X, None), "clean run: the process died with exit code 3", "that returns")


def test_an_op_that_hangs(define):
    op = define(SCHEMA, lambda x, y: time.sleep(60), UNREAD)
    start = time.monotonic()
    found = r"clean run: no answer after 0.2 seconds: .* than one OpenMP thread .* larger timeout="
    with pytest.raises(ContractError, match=found):
        check_contract(op, (X, None), timeout=0.2)
    assert time.monotonic() - start < 10


def test_what_the_op_raises_in_a_clean_run_is_passed_on(define):
    own = torch.ops.compile_ext.router_gemm_m1.default
    with pytest.raises(RankError, match=r"router_gemm_m1: found b of shape") as raised:
        check_contract(own, (X.bfloat16(), X.bfloat16(), None))
    assert isinstance(raised.value.__cause__, ChildTrace)
    assert "router_gemm_spec.py" in str(raised.value.__cause__)  # the child's own traceback

    class Local(Exception):
        """Cannot be pickled."""

    def raises(x: Tensor, y: Tensor | None) -> Tensor:
        raise Local("as it is")

    op = define(SCHEMA, raises, UNREAD)
    with pytest.raises(RuntimeError, match="Local: as it is"):
        check_contract(op, (X, None))


def test_a_false_claim_is_a_contract_error_of_its_own(define):
    op = define(SCHEMA, lambda x, y: x if y is None else x + y, UNREAD)
    with pytest.raises(ContractError) as raised:
        check_contract(op, (X, torch.ones(1)))
    assert isinstance(raised.value, ClaimError)
    assert isinstance(raised.value, CompileExtError)


def test_no_process_and_no_file_is_left(define, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    op = define(SCHEMA, lambda x, y: x + 1, UNREAD)
    check_contract(op, (X, torch.ones(1)))
    ends = define("op_2(Tensor x) -> Tensor", lambda x: os._exit(1), OpContract())
    with pytest.raises(ContractError):
        check_contract(ends, (X,))
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []


def _ends(*_: Any) -> None:
    os._exit(3)


def _hangs(*_: Any) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("serve", "found", "fix"),
    [
        (_ends, "start of the child process: the process died with exit code 3", "see stderr"),
        (_hangs, "start of the child process: no answer after 0.2 seconds", "a larger timeout="),
    ],
)
def test_a_start_that_fails_leaves_nothing(tmp_path, monkeypatch, serve, found, fix):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(isolated, "serve", serve)
    before = count_open_files()
    with pytest.raises(ContractError) as raised:
        Isolated("here", [], [], fork=True, seconds=0.2)
    assert raised.value.found == found
    assert raised.value.wanted == "a child process that starts"
    assert fix in raised.value.fix
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []
    assert count_open_files() == before  # while the error still refers to them


def test_a_process_that_cannot_be_started_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(isolated, "serve", lambda *_: None)  # cannot be pickled for a new process
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        Isolated("here", [], [], fork=False, seconds=20)
    assert list(tmp_path.iterdir()) == []


def count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_parent_that_is_killed_leaves_no_child_that_hangs(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, time, torch\n"
        "from compile_ext.ops import OpContract, register_contract\n"
        "from compile_ext.testing import check_contract\n"
        "@torch.library.custom_op('hangs::f', mutates_args=())\n"
        "def f(x: torch.Tensor) -> torch.Tensor:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(600)\n"
        "register_contract(torch.ops.hangs.f.default, OpContract())\n"
        "check_contract(torch.ops.hangs.f.default, (torch.ones(1),))\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # its files outlive it
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(100):
        if not _runs(child):
            break
        time.sleep(0.1)
    assert not _runs(child)


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# A child that starts anew, as it does for CUDA tensors.


def test_a_child_that_starts_anew_has_our_ops_and_keeps_the_layout():
    op = torch.ops.compile_ext.router_gemm_m1.default
    a, b = torch.randn(1, 8).bfloat16(), torch.randn(6, 16).bfloat16()[::2, ::2]
    with Isolated("here", [op], [], fork=False, seconds=120) as child:
        given = {"a": a, "b": b, "bias": None, "prefetch": False, "pinned": None}
        outcome = child.run("run", op, given, ["cpu", "cpu"])
    assert isinstance(outcome, Outcome)
    assert torch.equal(outcome.results, router_gemm_m1(a, b))
    assert outcome.arguments["b"].stride() == (32, 2)


def test_a_child_that_does_not_find_the_op():
    op: Any = SimpleNamespace(_schema=SimpleNamespace(name="nowhere::op"), _overloadname="default")
    sources: list[find_op.Source] = [("json", None), ("no_such_module_of_ours", None)]
    with pytest.raises(ContractError) as raised:
        Isolated("here", [op], sources, fork=True, seconds=20)
    error = raised.value
    assert error.found.startswith(
        "no nowhere::op.default in the child process, which imported json, no_such_module_of_ours ("
    )
    assert 'imports=("module",)' in error.fix


def test_where_the_op_comes_from(define, tmp_path, monkeypatch):
    op = define(SCHEMA, lambda x, y: x, UNREAD)
    names = [name for name, _ in find_op.sources(op, UNREAD, ["first"], "caller")]
    assert names[0] == "first"
    assert names[-1] == "caller"
    assert __name__ in names  # the predicate's module
    (tmp_path / "library_of_an_op.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('found_by_import::f', mutates_args=())\n"
        "def f(x: torch.Tensor) -> torch.Tensor:\n"
        "    return x.clone()\n"
    )
    source = [("library_of_an_op", str(tmp_path / "library_of_an_op.py"))]
    assert find_op.find(["found_by_import::f.default"], [], source) is None  # by its file
    op = torch.ops.found_by_import.f.default
    assert "library_of_an_op" in [n for n, _ in find_op.sources(op, OpContract(), [], "caller")]
    missing = find_op.find(["found_by_import::g.default"], [], [])
    assert missing == ("found_by_import::g.default", "nothing")
