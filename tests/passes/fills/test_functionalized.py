"""Mutable ops as torch.export programs hold them: ``auto_functionalized`` runs them on copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized

import compile_ext

PASS = "strip_placeholder_fills"
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills
POISON: dict[str, Any] = {"compile_ext.poison": True, "compile_ext.check": True}


def gone(name: str) -> tuple[bool, str]:
    return True, f"{name} is overwritten in full: what filled it is gone"


class Model(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Tensor) -> Any:
        return self.body(*args)


def exported(body: Any, *args: Tensor, **options: Any) -> nn.Module:
    program = torch.export.export(Model(body), args, **options).run_decompositions()
    assert "auto_functionalized_v2" in str(program.graph)
    return program.module()


def copied(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    ops.copy_out(x.relu(), out)
    return out + 1


def quantized(x: Tensor) -> tuple[Tensor, ...]:
    q, s = torch.zeros_like(x), x.new_ones(5, 1)
    fills.quantize(x, q, s)
    return q, s


def chained(x: Tensor) -> Tensor:
    """The first op's output is the second one's buffer."""
    out = torch.ones_like(x)
    ops.copy_out(x, out)
    ops.copy_out(out + 1, out)
    return out


@pytest.mark.parametrize("options", [{}, POISON], ids=["", "poison"])
@pytest.mark.parametrize(
    ("body", "decisions"),
    [
        (copied, [gone("out")]),
        (quantized, [gone("q"), gone("s")]),
        (chained, [gone("out")] * 2),
    ],
)
def test_exported_buffer_is_not_filled(
    rewrite: Any, body: Any, decisions: Any, options: dict[str, Any]
) -> None:
    x = torch.randn(5, 8)
    got = rewrite(exported(body, x), x, options=options)
    assert got.of(PASS) == decisions
    assert "full" not in got.graph


def test_graph(rewrite: Any) -> None:
    x = torch.randn(5, 8)
    assert_expected_inline(
        rewrite(exported(quantized, x), x).graph,
        """\
arg0: float32[5, 8]
%0: float32[5, 8] = empty([5, 8], device=cpu, dtype=float32)
%1: float32[5, 1] = empty([5, 1], device=cpu, dtype=float32)
%2 = auto_functionalized_v2(compile_ext_fills.quantize.default, _all_bases=[%0, %1], _q_base_index=0, _s_base_index=1, x=arg0)
%3: float32[5, 8] = getitem(%2, 1)
%4: float32[5, 1] = getitem(%2, 2)
return [%3, %4]""",  # noqa: E501
    )


def test_symbolic_rows(rewrite: Any) -> None:
    x = torch.randn(5, 8)
    rows = {"args": ({0: torch.export.Dim("rows", min=2, max=64)},)}
    model = exported(copied, x, dynamic_shapes=rows)
    torch._dynamo.mark_dynamic(x, 0)
    assert_expected_inline(
        rewrite(model, x).graph,
        """\
arg1: float32[s0, 8]
%0: float32[s0, 8] = aten::relu(arg1)
%1: float32[s0, 8] = empty([arg0, 8], device=cpu, dtype=float32)
%2 = auto_functionalized_v2(compile_ext_tests.copy_out.default, _all_bases=[%1], _out_base_index=0, x=%0)
%3: float32[s0, 8] = getitem(%2, 1)
%4: float32[s0, 8] = aten::add(%3, 1)
return [%4]""",  # noqa: E501
    )


def test_other_readers_see_the_fill(rewrite: Any) -> None:
    """The op works on a copy, so that its buffer may be another one."""

    def read_first(x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.full_like(x, 2.0)
        total = out.sum()
        ops.copy_out(x, out)
        return out, total

    x = torch.randn(5, 8)
    got = rewrite(exported(read_first, x), x)
    assert got.of(PASS) == [gone("out")]
    assert "aten::full" in got.graph


def test_constant_and_unread_arguments(rewrite: Any) -> None:
    def both(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        fills.scales(x, torch.ones(1), torch.ones(2), out)
        return out

    x = torch.randn(5, 8)
    assert_expected_inline(
        rewrite(exported(both, x), x).graph,
        """\
arg0: float32[5, 8]
arg1: float32[2] = uninitialised
arg2: float32[1] = full(1)
%0: float32[5, 8] = empty([5, 8], device=cpu, dtype=float32)
%1 = auto_functionalized_v2(compile_ext_fills.scales.default, _all_bases=[%0], _out_base_index=0, s=arg2, unread=arg1, x=arg0)
%2: float32[5, 8] = getitem(%1, 1)
return [%2]""",  # noqa: E501
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda x: (out := torch.zeros(10, 8), ops.copy_out(x, out[:5]))[0],
        lambda x: (out := torch.zeros(8, 5), ops.copy_out(x, out.t()))[0],
    ],
    ids=["a part", "a view"],
)
def test_views_of_a_buffer_are_left_alone(rewrite: Any, body: Any) -> None:
    """Their place in the buffer is written beside it, and is not read here."""
    x = torch.randn(5, 8)
    got = rewrite(exported(body, x), x)
    assert got.of(PASS) == []
    assert "aten::full" in got.graph


def test_input_is_left_alone(rewrite: Any) -> None:
    def given(x: Tensor, out: Tensor) -> Tensor:
        ops.copy_out(x, out)
        return out + 1

    args = torch.randn(5, 8), torch.zeros(5, 8)
    assert rewrite(exported(given, *args), *args).of(PASS) == []


BUFFERS = {
    "whole": lambda: torch.zeros(5, 8),
    "transposed": lambda: torch.zeros(8, 5).t(),
    "reshaped": lambda: torch.zeros(40).view(5, 8),
}


@pytest.mark.parametrize("options", [{}, POISON], ids=["", "poison"])
@pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS)
def test_first_version_takes_views(rewrite: Any, make: Any, options: dict[str, Any]) -> None:
    """The copy that the op works on has the form of the view."""

    def model(x: Tensor) -> Any:
        return auto_functionalized(ops.copy_out.default, x=x, out=make())[1]

    got = rewrite(model, torch.randn(5, 8), options=options)
    assert got.of(PASS) == [gone("out")]
    assert "zeros" not in got.graph


def test_first_version_of_a_part(rewrite: Any) -> None:
    def model(x: Tensor) -> Any:
        return auto_functionalized(ops.copy_out.default, x=x, out=torch.zeros(6, 8)[:5])[1]

    got = rewrite(model, torch.randn(5, 8))
    assert got.of(PASS) == [(False, "out is a part of its buffer, and the rest is not overwritten")]


def test_explain_names_the_op() -> None:
    x = torch.randn(5, 8)
    report = compile_ext.explain(exported(copied, x), x)
    assert [row.op for row in report.rows] == ["compile_ext_tests::copy_out"]
