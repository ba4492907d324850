"""Constants that a kernel reads are made once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

PASS = "strip_placeholder_fills"
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills


def said(how: str) -> tuple[bool, str]:
    return True, f"{how}, which it is given, is a constant"


MADE = {
    "ones": (lambda x: torch.ones(1), "full(1)"),
    "zeros": (lambda x: torch.zeros(8), "full(0)"),
    "full": (lambda x: torch.full((5, 1), 2.5), "full(2.5)"),
    "nan": (lambda x: torch.full((1,), float("nan")), "full(nan)"),
    "bool": (lambda x: torch.ones(1, dtype=torch.bool), "full(1)"),
    "new_ones": (lambda x: x.new_ones(1), "full(1)"),
    "ones_like": (torch.ones_like, "full(1)"),
    "aten": (lambda x: torch.ops.aten.full([1], 3), "full(3)"),
    "scalar_tensor": (lambda x: torch.scalar_tensor(1.5), "full(1.5)"),
    "tensor": (lambda x: torch.tensor(1.5), "tensor"),
    "tensor of integers": (lambda x: torch.tensor([1, 2] * 4), "tensor"),
    "fill_": (lambda x: torch.empty(1).fill_(2.0), "full(2.0)"),
    "fill_ by name": (
        lambda x: torch.fill_(input=torch.ones(1), value=2.0),
        "full(1), fill_",
    ),
    "zero_": (lambda x: torch.ones(1).zero_(), "full(1), zero_"),
    "setitem": (lambda x: (s := torch.zeros(8), s.__setitem__(0, 1.0))[0], "full(0), setitem"),
    "cast": (lambda x: torch.ones(1, dtype=torch.int8).float(), "full(1), float"),
    "expand": (
        lambda x: torch.ones(1).expand(5, 1).contiguous(),
        "full(1), expand, contiguous",
    ),
    "pad": (lambda x: F.pad(torch.ones(4), (0, 4), value=2.0), "full(1), pad"),
    "cat": (lambda x: torch.cat([torch.ones(4), torch.zeros(4)]), "full(1), full(0), cat"),
    "operator": (lambda x: torch.ones(1) / 3, "full(1), truediv"),
}


@pytest.mark.parametrize(("make", "how"), MADE.values(), ids=MADE)
def test_read_by_an_opaque_op(rewrite: Any, make: Any, how: str) -> None:
    got = rewrite(lambda x: fills.reads(x, make(x)), torch.randn(5, 8))
    assert got.of(PASS) == [said(how)]
    x, constant, op, output = got.modules[-1].graph.nodes
    assert op.args == (x, constant)
    assert output.args[0] == (op,)


READERS = {
    "overload": lambda x: fills.reads.default(x, torch.ones(1)),
    "keyword": lambda x: fills.reads(x, s=torch.ones(1)),
    "mm": lambda x: x @ torch.ones(8, 3),
    "aten": lambda x: torch.ops.aten.linear.default(x, torch.ones(3, 8)),
    "aten out": lambda x: torch.ops.aten.mm.out(x, torch.ones(8, 3), out=x.new_empty(5, 3)),
    "linear": lambda x: F.linear(x, torch.ones(3, 8)),
    "a view": lambda x: x @ torch.ones(3, 8).t(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], torch.ones(1, 5, 8)),
    "contract": lambda x: ops.gemm(x, torch.ones(8, 8), None, None, False),
}


@pytest.mark.parametrize("model", READERS.values(), ids=READERS)
def test_who_reads_it(rewrite: Any, model: Any) -> None:
    got = rewrite(model, torch.randn(5, 8))
    assert got.of(PASS) == [said("full(1)")]
    assert "ones(" not in got.graph


def test_one_constant_for_all_sites(rewrite: Any) -> None:
    def many(x: Tensor) -> list[Tensor]:
        same = [torch.ones(1), x.new_ones(1), torch.full((1,), 1)]
        other = [torch.full((1,), 1.0), torch.ones(1, dtype=torch.int64), torch.ones(1, 1)]
        return [fills.reads(x, s) for s in (*same, *other)]

    assert_expected_inline(
        rewrite(many, torch.randn(5, 8)).graph,
        """\
arg0: float32[5, 8]
arg1: float32[1] = full(1)
arg2: int64[1] = full(1)
arg3: float32[1] = full(1.0)
arg4: float32[1, 1] = full(1)
%0: float32[5, 8] = compile_ext_fills::reads(arg0, arg1)
%1: float32[5, 8] = compile_ext_fills::reads(arg0, arg1)
%2: float32[5, 8] = compile_ext_fills::reads(arg0, arg2)
%3: float32[5, 8] = compile_ext_fills::reads(arg0, arg3)
%4: float32[5, 8] = compile_ext_fills::reads(arg0, arg2)
%5: float32[5, 8] = compile_ext_fills::reads(arg0, arg4)
return [%0, %1, %2, %3, %4, %5]""",
    )


def test_one_constant_is_made_of_another(rewrite: Any) -> None:
    def nested(x: Tensor) -> tuple[Tensor, ...]:
        one = torch.ones(8, 8)
        two = one * 2
        copy = torch.empty(8, 8)
        copy.copy_(two)
        return x @ one, x @ two, x @ copy

    assert_expected_inline(
        rewrite(nested, torch.randn(5, 8)).graph,
        """\
arg0: float32[5, 8]
arg1: float32[8, 8] = full(1)
arg2: float32[8, 8] = full(1), mul
arg3: float32[8, 8] = full(1), mul, empty_strided, copy_
%0: float32[5, 8] = matmul(arg0, arg1)
%1: float32[5, 8] = matmul(arg0, arg2)
%2: float32[5, 8] = matmul(arg0, arg3)
return [%0, %1, %2]""",
    )


def test_pointwise_readers_keep_their_fill(rewrite: Any) -> None:
    """Inductor computes it in the kernel that reads it."""
    got = rewrite(lambda x: (x * torch.ones(1) + torch.zeros(8)).sum(), torch.randn(5, 8))
    assert got.of(PASS) == []
    assert "ones(1)" in got.graph
    assert "zeros(8)" in got.graph


def test_pointwise_beside_a_kernel(rewrite: Any) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.ones(1)
        return fills.reads(x, s), x + s

    got = rewrite(both, torch.randn(5, 8))
    assert got.of(PASS) == [said("full(1)")]
    assert "ones" not in got.graph
