"""Constants that a kernel reads, and that are made on each call all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

PASS = "strip_placeholder_fills"
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills


def said(how: str) -> tuple[bool, str]:
    return True, f"{how}, which it is given, is a constant"


def kept(how: str, reason: str) -> tuple[bool, str]:
    return False, f"{how}, which it is given, is made on each call: {reason}"


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
    assert [d for d in got.of(PASS) if "which it is given" in d[1]] == decisions
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
