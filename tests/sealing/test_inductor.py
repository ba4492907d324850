"""A seal and Inductor: code that is generated, not code that a cache had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

from compile_ext import CompileEvent, SealError, seal
from compile_ext.sealing import telling


def x(m: int = 3) -> Tensor:
    return torch.linspace(-1, 1, m * 8).view(m, 8)


def kinds(heard: list[CompileEvent]) -> list[str]:
    return [e.kind for e in heard]


@pytest.mark.parametrize("backend", ["inductor", "compile_ext"])
def test_a_graph_is_told_once_and_not_from_the_cache(
    model: nn.Module, heard: list[CompileEvent], backend: str
) -> None:
    compiled = torch.compile(model, backend=backend)
    with seal(heard.append):
        compiled(x())
        assert kinds(heard) == ["dynamo", "inductor"]
        torch._dynamo.reset()
        compiled(x())
    assert kinds(heard) == ["dynamo", "inductor", "dynamo"]
    graph = heard[1]
    assert "aten.addmm.default" in graph.kernel
    assert any(shape.endswith("float32[3, 8]") for shape in graph.shapes)
    assert len(graph.key) > 40  # the FX graph cache's


def test_without_a_cache_the_same_graph_is_told_again(
    model: nn.Module, heard: list[CompileEvent]
) -> None:
    compiled = torch.compile(model, backend="inductor")
    with config.patch(force_disable_caches=True), seal(heard.append):
        compiled(x())
        torch._dynamo.reset()
        compiled(x())
    assert kinds(heard) == ["dynamo", "inductor"] * 2


def test_the_graph_alone_without_dynamo(model: nn.Module) -> None:
    from torch._inductor.compile_fx import compile_fx

    refused: list[SealError] = []

    def backend(gm: Any, inputs: Any) -> Any:
        try:
            with seal("error"):
                return compile_fx(gm, inputs)
        except SealError as error:
            refused.append(error)
            return compile_fx(gm, inputs)

    for _ in range(2):  # the second time from the cache
        torch.testing.assert_close(torch.compile(model, backend=backend)(x()), model(x()))
        torch._dynamo.reset()
    assert [e.event.kind for e in refused] == ["inductor"]


@pytest.mark.parametrize("suppress", [False, True])
def test_a_trace_that_was_let_through_is_refused_at_its_graph(
    model: nn.Module, suppress: bool
) -> None:
    """As in a compile that has begun before the seal: Dynamo wraps what Inductor raises."""

    def refuse_graphs(event: CompileEvent) -> None:
        if event.kind == "inductor":
            raise event.error()

    compiled = torch.compile(model, backend="inductor")
    for _ in range(2):
        with (
            torch._dynamo.config.patch(suppress_errors=suppress),
            seal(refuse_graphs),
            pytest.raises(SealError) as refused,
        ):
            compiled(x())
        assert refused.value.event.kind == "inductor"
    assert telling._THREAD.refused is None  # it would keep the frames of the call alive
    torch.testing.assert_close(compiled(x()), model(x()))
    with seal("error"):
        compiled(x())


def test_a_backward_that_is_compiled_late(heard: list[CompileEvent]) -> None:
    linear = nn.Linear(8, 4)
    compiled = torch.compile(linear, backend="inductor", dynamic=False)
    given = x().requires_grad_()
    out = compiled(given)  # of fixed sizes: else AOTAutograd compiles the backward here
    with seal(heard.append):
        out.sum().backward()
    assert kinds(heard) == ["inductor"]
    assert given.grad is not None
