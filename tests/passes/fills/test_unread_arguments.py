"""Arguments that an op does not read: None, one shared buffer, or ``empty``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import compile_ext
from compile_ext.passes import PassContext, run_passes

PASS = "strip_placeholder_fills"
NONE = "scale is not read: None"
SHARED = "s is not read: a shared buffer, uninitialised"
EMPTY = "s is not read: uninitialised"
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills

FILLS = {
    "new_ones": lambda x: x.new_ones(1),
    "new_zeros": lambda x: x.new_zeros((1,)),
    "new_full": lambda x: x.new_full((1,), 2.0),
    "new_empty": lambda x: x.new_empty(1),
    "ones": lambda x: torch.ones(1),
    "zeros": lambda x: torch.zeros(1, device=x.device),
    "full": lambda x: torch.full((1,), 1.0),
    "ones_like": lambda x: torch.ones_like(x),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=torch.bfloat16),
    "full_like": lambda x: torch.full_like(x, 2.0),
    "aten": lambda x: torch.ops.aten.ones.default([1]),
    "aten packet": lambda x: torch.ops.aten.new_zeros(x, [1]),
    "fill_": lambda x: torch.empty(1).fill_(1.0),
    "torch.fill_": lambda x: torch.fill_(torch.empty(1), 1.0),
    "fill_ by name": lambda x: torch.fill_(input=torch.empty(1), value=1.0),
    "zero_": lambda x: x.new_empty(1).zero_(),
    "setitem": lambda x: (s := torch.empty(1), s.__setitem__(0, 1.0))[0],
    "tensor": lambda x: torch.tensor(1.0),
    "tensor of a list": lambda x: torch.tensor([1.0]),
    "scalar_tensor": lambda x: torch.scalar_tensor(1.0),
    "view": lambda x: x.new_ones(1).view(1, 1),
    "expand": lambda x: x.new_ones(1).expand(5, 1),
    "to": lambda x: torch.ones(1, dtype=torch.int64).to(torch.float32),
    "contiguous": lambda x: torch.ones(1).expand(5, 1).contiguous(),
    "operator": lambda x: torch.ones(1) * 2.0,
    "a computed value": lambda x: x.abs().amax().reshape(1) / 448,
}  # fmt: skip

CALLS = {
    "packet": lambda x, w, s: ops.gemm(x, w, s, None, False),
    "overload": lambda x, w, s: ops.gemm.default(x, w, s, None, False),
    "keyword": lambda x, w, s: ops.gemm(x=x, w=w, scale=s, bias=None, quantized=False),
}


def plain(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """The schema says Tensor, so that None is no value for it."""
    return ops.gemm_nn(x, w, s)


def dynamic(*shape: int, at: tuple[int, ...] = (0,)) -> Tensor:
    x = torch.randn(*shape)
    for dim in at:
        torch._dynamo.mark_dynamic(x, dim)
    return x


@pytest.mark.parametrize(
    ("call", "fill"), [*(("packet", f) for f in FILLS), *((c, "new_ones") for c in CALLS)]
)
def test_optional_becomes_none(rewrite: Any, filled: Any, call: str, fill: str) -> None:
    got = rewrite(filled(CALLS[call], FILLS[fill]), torch.randn(5, 8))
    assert got.of(PASS) == [(True, NONE)]
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[5, 8]
%0: float32[5, 8] = compile_ext_tests::gemm(arg1, arg0, None, None, False)
return [%0]""",
    )


@pytest.mark.parametrize("fill", FILLS)
def test_plain_tensor_becomes_a_shared_buffer(rewrite: Any, filled: Any, fill: str) -> None:
    got = rewrite(filled(plain, FILLS[fill]), torch.randn(5, 8))
    assert got.of(PASS) == [(True, SHARED)]
    *_, derived, gemm, output = got.modules[-1].graph.nodes
    assert derived.op == "placeholder"
    assert gemm.args[2] is derived
    assert output.args[0] == (gemm,)


def test_shared_buffer_graph(rewrite: Any, filled: Any) -> None:
    got = rewrite(filled(plain, FILLS["new_ones"]), torch.randn(5, 8))
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[5, 8]
arg2: float32[1] = uninitialised
%0: float32[5, 8] = compile_ext_tests::gemm_nn(arg1, arg0, arg2)
return [%0]""",
    )


def test_one_buffer_for_each_form(rewrite: Any) -> None:
    def many(x: Tensor) -> list[Tensor]:
        bf16, column = torch.ones(1).bfloat16(), torch.ones(3, 2).t()
        return [
            fills.ignores(x, s)
            for s in (x.new_ones(1), torch.zeros(1), bf16, torch.ones(2, 3), column, x.sum())
        ]

    assert_expected_inline(
        rewrite(many, torch.randn(5, 8)).graph,
        """\
arg0: float32[5, 8]
arg1: float32[1] = uninitialised
arg2: bfloat16[1] = uninitialised
arg3: float32[2, 3] = uninitialised
arg4: float32[2, 3] = uninitialised
arg5: float32[] = uninitialised
%0: float32[5, 8] = compile_ext_fills::ignores(arg0, arg1)
%1: float32[5, 8] = compile_ext_fills::ignores(arg0, arg1)
%2: float32[5, 8] = compile_ext_fills::ignores(arg0, arg2)
%3: float32[5, 8] = compile_ext_fills::ignores(arg0, arg3)
%4: float32[5, 8] = compile_ext_fills::ignores(arg0, arg4)
%5: float32[5, 8] = compile_ext_fills::ignores(arg0, arg5)
return [%0, %1, %2, %3, %4, %5]""",
    )


def test_sizes_that_depend_on_the_call_become_empty(rewrite: Any, filled: Any) -> None:
    got = rewrite(filled(plain, FILLS["ones_like"]), dynamic(5, 8))
    assert got.of(PASS) == [(True, EMPTY)]
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg2: float32[s0, 8]
%0: float32[s0, 8] = empty([arg1, 8], device=cpu, dtype=float32)
%1: float32[s0, 8] = compile_ext_tests::gemm_nn(arg2, arg0, %0)
return [%1]""",
    )


@pytest.mark.parametrize("m", [1, 2, 7])
def test_static_fill_beside_dynamic_m(rewrite: Any, filled: Any, m: int) -> None:
    """What is no size of x is static under dynamic=True as well."""
    got = rewrite(filled(plain, FILLS["new_ones"]), torch.randn(m, 8), dynamic=True)
    assert got.of(PASS) == [(True, SHARED)]


@pytest.mark.parametrize(
    ("shape", "at"), [((5, 3, 8), (0, 1)), ((5, 3, 8), (0, 1, 2)), ((5, 1, 8), (0,))]
)
def test_several_symbolic_dimensions(
    rewrite: Any, shape: tuple[int, ...], at: tuple[int, ...]
) -> None:
    got = rewrite(lambda x: fills.ignores(x, torch.ones_like(x)), dynamic(*shape, at=at))
    assert got.of(PASS) == [(True, EMPTY)]


def test_symbolic_and_optional_becomes_none(rewrite: Any, filled: Any) -> None:
    got = rewrite(filled(CALLS["packet"], FILLS["ones_like"]), dynamic(5, 8))
    assert got.of(PASS) == [(True, NONE)]


@pytest.mark.parametrize("read", [True, False])
def test_idempotent(rewrite: Any, filled: Any, read: bool) -> None:
    got = rewrite(
        filled(lambda x, w, s: ops.gemm(x, w, s, None, read), FILLS["new_ones"]), torch.randn(5, 8)
    )
    before = got.graph
    run_passes(PassContext(got.modules[-1], [torch.randn(1)] * 3))
    assert got.graph == before


def test_not_when_read(rewrite: Any, filled: Any) -> None:
    def call(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return ops.gemm(x, w, s, None, True)

    got = rewrite(filled(call, FILLS["new_ones"]), torch.randn(5, 8))
    assert got.of(PASS) == [
        (False, "scale is read"),
        (True, "full(1), which it is given, is a constant"),
    ]


def test_switched_off(rewrite: Any, filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_EXT_DISABLE", PASS)
    got = rewrite(filled(CALLS["packet"], FILLS["new_ones"]), torch.randn(5, 8))
    assert got.of(PASS) == []
    assert "ones" in got.graph


def test_explain(filled: Any) -> None:
    torch._dynamo.reset()
    model = filled(plain, FILLS["new_ones"])
    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    with torch.no_grad():
        compiled(torch.randn(5, 8))
    [row] = compile_ext.explain(compiled).rows
    assert (row.module, row.op) == ("w", "compile_ext_tests::gemm_nn")
    assert [(d.fired, d.detail) for d in row.decisions if d.pass_name == PASS] == [(True, SHARED)]
