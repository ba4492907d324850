"""Unread arguments that others read, or write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

PASS = "strip_placeholder_fills"
NONE = "scale is not read: None"
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills


READERS = {
    "is returned": (lambda s: s, "the graph hands it out"),
    "is returned as a view": (lambda s: s.view(1, 1), "the graph hands it out"),
    "is read": (lambda s: s + 1, "others read it"),
    "is written later": (lambda s: s.add_(1) + 0, "the graph writes it"),
    "is written through a view": (lambda s: s.view(1, 1).mul_(3).sum(), "the graph writes it"),
}


@pytest.mark.parametrize(("reader", "reason"), READERS.values(), ids=READERS)
def test_other_readers_keep_the_fill(rewrite: Any, filled: Any, reader: Any, reason: str) -> None:
    def call(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return ops.gemm(x, w, s, None, False), reader(s)

    got = rewrite(filled(call, lambda x: x.new_ones(1)), torch.randn(5, 8))
    assert got.of(PASS) == [(True, NONE), (False, f"what fills scale stays: {reason}")]
    assert ".new_ones(arg1, 1)" in got.graph
    assert "gemm(arg1, arg0, None" in got.graph


def test_only_some_readers_ignore_it(rewrite: Any, filled: Any) -> None:
    def call(x: Tensor, w: Tensor, s: Tensor) -> Any:
        both = [ops.gemm(x, w, s, None, quantized) for quantized in (False, True)]
        return *both, ops.gemm_nn(x, w, s)

    got = rewrite(filled(call, lambda x: x.new_ones(1)), torch.randn(5, 8))
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[5, 8]
arg2: float32[1] = uninitialised
arg3: float32[1] = full(1)
%0: float32[5, 8] = compile_ext_tests::gemm(arg1, arg0, None, None, False)
%1: float32[5, 8] = compile_ext_tests::gemm(arg1, arg0, arg3, None, True)
%2: float32[5, 8] = compile_ext_tests::gemm_nn(arg1, arg0, arg2)
return [%0, %1, %2]""",
    )


def test_writes_before_it_go_when_nobody_else_reads(rewrite: Any, filled: Any) -> None:
    def call(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        s.zero_()
        s[:] = 3.0
        return ops.gemm(x, w, s, None, False)

    got = rewrite(filled(call, lambda x: x.new_ones(1)), torch.randn(5, 8))
    assert got.of(PASS) == [(True, NONE)]
    assert [n.op for n in got.modules[-1].graph.nodes][-2:] == ["call_function", "output"]


def test_one_tensor_given_twice(rewrite: Any, filled: Any) -> None:
    """Unread as the scale, read as the bias."""

    def call(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return ops.gemm(x, w, s, s, False)

    got = rewrite(filled(call, lambda x: x.new_ones(8)), torch.randn(5, 8))
    assert got.of(PASS)[0] == (True, NONE)
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[5, 8]
arg2: float32[8] = full(1)
%0: float32[5, 8] = compile_ext_tests::gemm(arg1, arg0, None, arg2, False)
return [%0]""",
    )


def test_an_input_that_is_written_stays_written(rewrite: Any) -> None:
    """The unread argument is the caller's own tensor, and the write must reach the caller."""

    def call(x: Tensor, s: Tensor) -> Tensor:
        return fills.ignores(x, s.add_(1).view(1, 1))

    given = torch.zeros(1)
    got = rewrite(call, torch.randn(5, 8), given)
    assert got.of(PASS) == [
        (False, "s is an input of the graph, which costs nothing"),
    ]
    assert given.item() == 2  # eager and compiled
