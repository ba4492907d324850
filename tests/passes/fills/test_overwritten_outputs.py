"""Buffers that an op overwrites in full are not filled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

PASS = "strip_placeholder_fills"
GONE = (True, "out is overwritten in full: what filled it is gone")
USED = (False, "out is used before the op overwrites it")
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills


def copied(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``out = make(x)``, and an op that overwrites it."""

    def run(x: Tensor) -> Tensor:
        out = make(x)
        ops.copy_out(x, out)
        return out

    return run


BUFFERS = {
    "zeros": lambda x: torch.zeros(5, 8),
    "ones": lambda x: torch.ones(5, 8),
    "full": lambda x: torch.full((5, 8), 2.0),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(5, 8),
    "zero_": lambda x: torch.empty(5, 8).zero_(),
    "fill_": lambda x: torch.empty_like(x).fill_(1.0),
    "fill_ by name": lambda x: torch.fill_(input=torch.empty_like(x), value=1.0),
    "copy_": lambda x: torch.empty_like(x).copy_(x),
    "setitem": lambda x: (out := torch.empty(5, 8), out.__setitem__(slice(2), 1.0))[0],
    "view": lambda x: torch.zeros(40).view(5, 8),
    "a part is filled": lambda x: (out := torch.empty(5, 8), out[:, 3].fill_(1.0))[0],
    "computed": lambda x: x * 2,
    "moved": lambda x: torch.zeros(5, 8, dtype=torch.int64).to(torch.float32),
}


@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_buffer_is_not_filled(rewrite: Any, make: Any) -> None:
    got = rewrite(copied(make), torch.randn(5, 8))
    assert got.of(PASS) == [GONE]
    made = re.findall(r"= \.?([\w:]+)\(", got.graph)
    assert [x for x in made if x != "view"] == ["empty", "compile_ext_tests::copy_out"]


def test_graph(rewrite: Any) -> None:
    got = rewrite(copied(BUFFERS["zeros"]), torch.randn(5, 8))
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[5, 8]
%0: float32[5, 8] = empty([5, 8], device=cpu, dtype=float32)
%1 = compile_ext_tests::copy_out(arg0, %0)
return [%0]""",
    )


def test_symbolic_rows(rewrite: Any) -> None:
    x = torch.randn(5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    got = rewrite(copied(lambda x: torch.zeros(x.shape[0], 8)), x)
    assert_expected_inline(
        got.graph,
        """\
arg1: float32[s0, 8]
%0: float32[s0, 8] = empty([arg0, 8], device=cpu, dtype=float32)
%1 = compile_ext_tests::copy_out(arg1, %0)
return [%0]""",
    )


def test_column_major(rewrite: Any) -> None:
    """A transposed view of all of the buffer: the buffer keeps its own form."""

    def transposed(x: Tensor) -> Tensor:
        out = torch.zeros(8, 5)
        ops.copy_out(x, out.t())
        return out

    got = rewrite(transposed, torch.randn(5, 8))
    assert got.of(PASS) == [GONE]


OUT = {
    "overload": lambda x, out: fills.copy.out(x, out=out),
    "packet": lambda x, out: fills.copy(x, out=out),
    "result unused": lambda x, out: (fills.copy.out(x, out=out), out)[1],
}


@pytest.mark.parametrize("call", OUT.values(), ids=OUT)
def test_out_overloads(rewrite: Any, call: Any) -> None:
    got = rewrite(lambda x: call(x, torch.zeros(5, 8)) + 0, torch.randn(5, 8))
    assert got.of(PASS) == [GONE]
    assert "zeros" not in got.graph


def test_overload_without_out_is_no_candidate(rewrite: Any) -> None:
    assert rewrite(lambda x: fills.copy(x), torch.randn(5, 8)).of(PASS) == []


def test_two_outputs(rewrite: Any, op_calls: list[str]) -> None:
    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        q, s = torch.zeros_like(x), x.new_ones(5, 1)
        fills.quantize(x, q, s)
        return q, s

    got = rewrite(quantize, torch.randn(5, 8))
    assert got.of(PASS) == [
        (True, "q is overwritten in full: what filled it is gone"),
        (True, "s is overwritten in full: what filled it is gone"),
    ]
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[5, 8]
%0: float32[5, 8] = empty([5, 8], device=cpu, dtype=float32)
%1: float32[5, 1] = empty([5, 1], device=cpu, dtype=float32)
%2 = compile_ext_fills::quantize(arg0, %0, %1)
return [%0, %1]""",
    )


def test_two_outputs_in_one_buffer(rewrite: Any) -> None:
    def quantize(x: Tensor) -> Tensor:
        both = torch.zeros(2, 5, 8)
        fills.quantize(x, both[0], both[1, :, :1])
        return both

    got = rewrite(quantize, torch.randn(5, 8))
    assert [fired for fired, _ in got.of(PASS)] == [False, False]
    assert "zeros(2, 5, 8)" in got.graph


def test_each_turn_of_a_loop_has_its_buffer(rewrite: Any) -> None:
    def loop(x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for i in range(3):
            out = torch.full_like(x, float(i))
            out[1:] = 4
            ops.copy_out(x + i, out)
            total = total + out
        return total

    assert rewrite(loop, torch.randn(5, 8)).of(PASS) == [GONE] * 3


def test_one_buffer_filled_in_a_loop(rewrite: Any) -> None:
    """Later fills come behind a reader of the turn before."""

    def loop(x: Tensor) -> Tensor:
        out, total = torch.zeros_like(x), torch.zeros(())
        for i in range(3):
            out.fill_(i)
            ops.copy_out(x + i, out)
            total = total + out.sum()
        return total

    got = rewrite(loop, torch.randn(5, 8))
    assert got.of(PASS) == [GONE, USED, USED]


def test_writes_behind_the_op_stay(rewrite: Any) -> None:
    def later(x: Tensor) -> Tensor:
        out = torch.zeros(5, 8)
        ops.copy_out(x, out)
        out[0] = 3.0
        return out.add_(1)

    assert rewrite(later, torch.randn(5, 8)).of(PASS) == [GONE]


def test_work_behind_the_fill_goes(rewrite: Any) -> None:
    def worked(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.copy_(torch.softmax(x.exp(), -1))
        ops.copy_out(x, out)
        return out

    got = rewrite(worked, torch.randn(5, 8))
    assert got.of(PASS) == [GONE]
    assert "softmax" not in got.graph
    assert "exp" not in got.graph
