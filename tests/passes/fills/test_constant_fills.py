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
    return True, f"{how}, which it reads, is a constant"


def kept(how: str, reason: str) -> tuple[bool, str]:
    return False, f"{how}, which it reads, is made on each call: {reason}"


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


def test_writes_between_two_readers(rewrite: Any) -> None:
    def written(x: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.ones(1)
        first = fills.reads(x, s)
        s.fill_(2.0)
        return first, fills.reads(x, s)

    got = rewrite(written, torch.randn(5, 8))
    assert got.of(PASS) == [kept("full(1), fill_", "it is read before it is complete")]


def returned(x: Tensor) -> Any:
    s = torch.ones(1)
    return fills.reads(x, s), s


def returned_as_a_view(x: Tensor) -> Any:
    s = torch.ones(1)
    return fills.reads(x, s), s.view(1, 1)


def written(x: Tensor) -> Any:
    s = torch.ones(1)
    y = fills.reads(x, s)
    s.add_(1)
    return y


def written_by_name(x: Tensor) -> Any:
    s = torch.full((1,), 0.5)
    y = fills.reads(x, s)
    torch.sigmoid_(input=s)
    return y


def written_by_an_op(x: Tensor) -> Any:
    s = torch.ones(5, 8)
    y = fills.reads(x, s)
    fills.adds(x, s)
    return y


def computed_from_an_input(x: Tensor) -> Any:
    return fills.reads(x, torch.ones(1) * x[0, 0])


def random_like(x: Tensor) -> Any:
    return fills.reads(x, torch.ones(8) + 0 * torch.rand(8))


def bernoulli(x: Tensor) -> Any:
    return fills.reads(x, torch.bernoulli(torch.ones(8)))


def uninitialised(x: Tensor) -> Any:
    return fills.reads(x, torch.empty(8)).mul(0).nan_to_num(0)


def too_large(x: Tensor) -> Any:
    return fills.reads(x, torch.ones(5, 2048)[:, :8])


WRITTEN = "the graph writes the result"
LEFT = {
    returned: [kept("full(1)", "the graph hands it out")],
    returned_as_a_view: [kept("full(1)", "the graph hands it out")],
    written: [kept("full(1)", WRITTEN)],
    written_by_name: [kept("full(0.5)", WRITTEN)],
    written_by_an_op: [kept("full(1)", WRITTEN)],
    too_large: [
        kept(
            "full(1)",
            "it would take 40960 bytes, and 0 of 0 are left (compile_ext.memory_budget)",
        )
    ],
    computed_from_an_input: [],
    random_like: [],
    bernoulli: [],
    uninitialised: [],
}


@pytest.mark.parametrize(("model", "decisions"), LEFT.items(), ids=[f.__name__ for f in LEFT])
def test_left_alone(rewrite: Any, model: Any, decisions: Any) -> None:
    got = rewrite(model, torch.ones(5, 8))
    assert [d for d in got.of(PASS) if "which it reads" in d[1]] == decisions
    assert "derived" not in str([n.name for n in got.modules[-1].graph.nodes])


@pytest.mark.parametrize("budget", [0, 3, 4])
def test_memory_budget(rewrite: Any, budget: int) -> None:
    got = rewrite(
        lambda x: fills.reads(x, torch.ones(1)),
        torch.randn(5, 8),
        options={"compile_ext.memory_budget": budget},
    )
    assert got.of(PASS) == [
        said("full(1)")
        if budget == 4
        else kept(
            "full(1)",
            f"it would take 4 bytes, and {budget} of {budget} are left (compile_ext.memory_budget)",
        )
    ]


def test_not_what_may_fail_in_a_branch(rewrite: Any) -> None:
    """The branch is not taken, and a singular matrix has no inverse."""

    def branches(x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 1e9,
            lambda x: x @ torch.linalg.inv(torch.zeros(8, 8)),
            lambda x: x @ torch.zeros(8, 8),
            (x,),
        )

    got = rewrite(branches, torch.randn(5, 8))
    reason = "it is in a branch that may not be taken, and can fail"
    assert got.of(PASS) == [kept("full(0), linalg_inv", reason), said("full(0)")]


@pytest.mark.parametrize("dynamic", [True, False])
def test_value_that_is_a_size(rewrite: Any, dynamic: bool) -> None:
    got = rewrite(
        lambda x: fills.reads(x, torch.full((1,), x.shape[0])), torch.randn(5, 8), dynamic=dynamic
    )
    assert got.of(PASS) == ([] if dynamic else [said("full(5)")])


def test_another_default_dtype_and_device() -> None:
    """Between two calls: each gets what its own graph says."""

    def model(x: Tensor) -> Tensor:
        return fills.reads(x, torch.ones(1) * 3) + fills.reads(x, torch.tensor(0.1))

    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    x = torch.randn(5, 8, dtype=torch.float64)
    first = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float32, torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            assert torch.equal(compiled(x), model(x))
        torch.set_default_device("cpu")
        assert torch.equal(compiled(x), model(x))
    finally:
        torch.set_default_dtype(first)
        torch.set_default_device(None)
