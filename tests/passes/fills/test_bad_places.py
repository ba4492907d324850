"""Fills in bodies of higher-order ops, behind graph breaks, under autocast and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.utils.checkpoint import checkpoint

import compile_ext

PASS = "strip_placeholder_fills"
NONE = "scale is not read: None"
SHARED = "s is not read: a shared buffer, uninitialised"
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills


class Gemm(nn.Module):
    """``body(x, w)`` with a weight that names it."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.body(x, self.w)


def optional(x: Tensor, w: Tensor) -> Tensor:
    return ops.gemm(x, w, x.new_ones(1), None, False)


def plain(x: Tensor, w: Tensor) -> Tensor:
    return ops.gemm_nn(x, w, x.new_ones(1))


def overwritten(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    ops.copy_out(x, out)
    return out


def constant(x: Tensor, w: Tensor) -> Tensor:
    return fills.reads(x, torch.ones(1))


MADE = {
    optional: (True, NONE),
    plain: (True, SHARED),
    overwritten: (True, "out is overwritten in full: what filled it is gone"),
    constant: (True, "full(1), which it is given, is a constant"),
}
BODIES = {
    "checkpoint": lambda body: lambda x, w: checkpoint(body, x, w, use_reentrant=False),
    "cond": lambda body: lambda x, w: torch.cond(x.sum() > 0, body, body, (x, w)),
}
CAPTURES = {"checkpoint": "tag_activation_checkpoint", "cond": "cond"}
KEPT = "full(1), which it is given, is made on each call: {} captures it"


@pytest.mark.parametrize("place", BODIES)
@pytest.mark.parametrize(("body", "decision"), MADE.items(), ids=[f.__name__ for f in MADE])
def test_made_inside_a_body(rewrite: Any, place: str, body: Any, decision: Any) -> None:
    got = rewrite(Gemm(BODIES[place](body)), torch.randn(5, 8))
    assert set(got.of(PASS)) == {decision}
    assert "ones" not in got.graph
    assert "zeros" not in got.graph


def test_one_buffer_for_both_branches(rewrite: Any) -> None:
    got = rewrite(Gemm(BODIES["cond"](plain)), torch.randn(5, 8))
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[5, 8]
arg2: float32[1] = uninitialised
%0: float32[] = .sum(arg1)
%1: bool[] = gt(%0, 0)
%2 = body:
    arg0: float32[8, 8]
    arg1: float32[5, 8]
    arg2: float32[1] = uninitialised
    %0: float32[5, 8] = compile_ext_tests::gemm_nn(arg1, arg0, arg2)
    return [%0]
%3 = body:
    arg0: float32[8, 8]
    arg1: float32[5, 8]
    arg2: float32[1] = uninitialised
    %0: float32[5, 8] = compile_ext_tests::gemm_nn(arg1, arg0, arg2)
    return [%0]
%4 = cond(%1, %2, %3, [arg0, arg1, arg2])
%5: float32[5, 8] = getitem(%4, 0)
return [%5]""",
    )


def test_in_a_body_that_takes_no_operand(rewrite: Any) -> None:
    def loop(x: Tensor) -> Tensor:
        def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, fills.ignores(y, y.new_ones(1)) + fills.reads(y, torch.ones(1))

        return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x))[1]

    got = rewrite(loop, torch.randn(5, 8))
    assert got.of(PASS) == [
        (False, "tensor, which it is given, is made on each call: while_loop captures it"),
        (True, "s is not read: uninitialised"),
        (
            False,
            "full(1), which it is given, is made on each call: it is inside while_loop, which takes"
            " no further operand",
        ),
    ]


@pytest.mark.parametrize("place", BODIES)
def test_captured_by_a_body_that_ignores_it(rewrite: Any, place: str) -> None:
    """The operand stays, and what makes it; inside, the op gets None all the same."""

    def captured(x: Tensor, w: Tensor) -> Any:
        s = x.new_ones(1)
        return BODIES[place](lambda x, w: ops.gemm(x, w, s, None, False))(x, w)

    got = rewrite(Gemm(captured), torch.randn(5, 8))
    assert set(got.of(PASS)) == {(True, NONE), (False, KEPT.format(CAPTURES[place]))}
    assert ".new_ones(" in got.graph


@pytest.mark.parametrize("place", BODIES)
def test_captured_by_a_body_that_reads_it(rewrite: Any, place: str) -> None:
    def captured(x: Tensor, w: Tensor) -> Any:
        s = x.new_ones(1)
        inside = BODIES[place](lambda x, w: fills.reads(x, s))(x, w)
        return inside, ops.gemm(x, w, s, None, False), fills.reads(x, s)

    got = rewrite(Gemm(captured), torch.randn(5, 8))
    assert (True, NONE) in got.of(PASS)
    assert (False, "what fills scale stays: others read it") in got.of(PASS)
    assert (False, KEPT.format(CAPTURES[place])) in got.of(PASS)
    assert ".new_ones(" in got.graph


@pytest.mark.parametrize(("body", "decision"), MADE.items(), ids=[f.__name__ for f in MADE])
def test_behind_a_graph_break(rewrite: Any, body: Any, decision: Any) -> None:
    def broken(x: Tensor, w: Tensor) -> Any:
        torch._dynamo.graph_break()
        return body(x, w)

    assert rewrite(Gemm(broken), torch.randn(5, 8)).of(PASS) == [decision]


def test_fill_before_a_graph_break(rewrite: Any) -> None:
    """In two graphs: the second gets the fill as an input."""

    def broken(x: Tensor, w: Tensor) -> Any:
        s, t = x.new_ones(1), x.new_ones(1)
        torch._dynamo.graph_break()
        return ops.gemm(x, w, s, None, False), ops.gemm_nn(x, w, t)

    got = rewrite(Gemm(broken), torch.randn(5, 8))
    assert got.of(PASS) == [
        (True, NONE),
        (False, "s is an input of the graph, which costs nothing"),
    ]


GRAD = "it needs a gradient"


def test_not_when_a_gradient_is_needed(rewrite: Any) -> None:
    x = torch.randn(5, 8, requires_grad=True)
    assert rewrite(Gemm(optional), x, grad=True).of(PASS) == [
        (False, GRAD),
        (False, f"full(1), which it is given, is made on each call: {GRAD}"),
    ]


def test_not_a_fill_that_requires_grad(rewrite: Any) -> None:
    def leaf(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.ones(1, requires_grad=True)
        return ops.gemm_nn(x, w, s), ops.gemm(x, w, s, None, False)

    got = rewrite(Gemm(leaf), torch.randn(5, 8))
    assert got.of(PASS)[0] == (False, "s requires grad")
    assert (False, "scale requires grad") in got.of(PASS)
    assert "gemm(arg0, arg1, arg2, None, False)" in got.graph  # Dynamo makes the leaf an input


def test_not_under_autocast(rewrite: Any) -> None:
    def autocast(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ops.gemm_nn(x, w, x.new_ones(1))

    assert rewrite(Gemm(autocast), torch.randn(5, 8)).of(PASS)[0] == (
        False,
        "it is inside an autocast region",
    )


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_not_a_size_that_depends_on_data(rewrite: Any) -> None:
    def masked(x: Tensor, w: Tensor) -> Any:
        some = x[x[:, 0] > 0]
        out = torch.zeros_like(some)
        ops.copy_out(some, out)
        return (
            fills.ignores(x, torch.ones_like(some)),
            ops.gemm(x, w, torch.ones_like(some), None, False),
            out,
        )

    got = rewrite(Gemm(masked), torch.randn(5, 8))
    assert sorted(got.of(PASS)) == [
        (False, f"the size of {name} depends on data") for name in ("out", "s", "scale")
    ]
    assert got.graph.count("_like(") == 3


@pytest.mark.parametrize("wanted", [True, False])
def test_not_inside_a_transform(rewrite: Any, wanted: bool) -> None:
    """Also where nobody reads what the transform gives: its nodes are not looked into."""

    def mapped(x: Tensor) -> Any:
        y = torch.func.vmap(lambda row: torch.sin(row) * row.new_ones(1))(x)
        return (y if wanted else x) + 1, fills.ignores(x, y)

    got = rewrite(mapped, torch.randn(5, 8))
    assert got.of(PASS) == [(True, SHARED)]
    assert ".new_ones(" in got.graph


def test_layer_compile() -> None:
    layers = nn.Sequential(*(Gemm(plain) for _ in range(3)))
    x = torch.randn(5, 8)
    with torch.no_grad():
        want = layers(x)
        for layer in layers:
            layer.compile(backend="compile_ext", options={"compile_ext.inner": "eager"})
        assert torch.equal(layers(x), want)
    report = compile_ext.explain(layers)
    assert [row.module for row in report.rows] == ["0.w", "1.w", "2.w"]
    for row in report.rows:
        assert SHARED in [d.detail for d in row.decisions if d.fired]
