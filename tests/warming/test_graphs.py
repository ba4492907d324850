"""The graphs of a model: seen before they run, then compiled for each batch size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext.layers import BlockFp8Linear
from compile_ext.ops.device import Target
from compile_ext.ops.errors import ArgumentError, WarmupError
from compile_ext.warming.graphs import foretell, warm_graphs

H200 = Target((9, 0), "NVIDIA H200", 132)


class Model(nn.Module):
    """Counts its calls by size; a tied weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = BlockFp8Linear(torch.randn(128, 128))
        self.two = BlockFp8Linear(torch.randn(128, 128))
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) + self.seen


def inputs(size: int) -> tuple[Tensor]:
    return (torch.ones(size, 128, dtype=torch.bfloat16),)


def compiled(model: Any, **how: Any) -> Any:
    options: Any = {"compile_ext.inner": "eager"}
    return torch.compile(model, backend="compile_ext", options=options, **how)


def ranges(manifest: compile_ext.Manifest) -> set[tuple[int, int | None]]:
    return {x.call.m for x in manifest.sites if x.call.n is not None}


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def test_what_the_graphs_will_call_goes_by_the_options_of_the_model() -> None:
    options: Any = {"compile_ext.kernels": {"block_scaled_mm": "triton"}}
    model = torch.compile(Model(), backend="compile_ext", options=options)
    found = foretell(model, (8,), inputs, H200)
    pinned = {dict(x.call.arguments)["pinned"] for x in found.sites if x.call.n is not None}
    assert pinned == {"triton"}


def test_what_the_graphs_of_a_gpu_will_call_is_seen_without_one() -> None:
    model = Model()
    found = foretell(compiled(model, dynamic=True), (1, 8), inputs, H200)
    assert ranges(found) == {(1, 1), (2, None)}
    assert {x.modules for x in found.sites if x.call.n is not None} == {
        ("one",)
    }  # tied: its first name
    seen: Any = model.seen
    assert not seen.any()
    assert all(not x.is_meta for x in (*model.parameters(), *model.buffers()))


def test_sizes_are_compiled_as_the_user_compiles() -> None:
    static = foretell(compiled(Model(), dynamic=False), (1, 8, 4), inputs, H200)
    assert ranges(static) == {(1, 1), (8, 8), (4, 4)}


def test_each_size_is_called_the_largest_first() -> None:
    called: list[int] = []

    def noting(size: int) -> dict[str, Tensor]:
        called.append(size)
        return {"x": inputs(size)[0]}

    found = warm_graphs(compiled(Model(), dynamic=True), (1, 8, 4, 8), noting)
    assert called == [8, 4, 1]
    assert [(x.batch_size, x.graphs, x.reason) for x in found] == [
        (8, 1, ""),
        (4, 0, ""),
        (1, 1, ""),
    ]


def test_a_size_that_fails_costs_itself_alone() -> None:
    def some(size: int) -> tuple[Any, ...]:
        if size == 4:
            raise RuntimeError("no memory\nat all")
        return inputs(size)

    found = warm_graphs(compiled(Model(), dynamic=True), (8, 4, 2), some)
    assert [x.reason for x in found] == ["", "RuntimeError: no memory", ""]


def test_a_warmup_of_a_model_that_was_never_called() -> None:
    with pytest.warns(UserWarning, match="no GPU here"):
        report = compile_ext.warmup(
            compiled(Model(), dynamic=True), batch_sizes=(1, 8), inputs=inputs, progress=False
        )
    assert [(x.batch_size, x.graphs) for x in report.graphs] == [(8, 1), (1, 1)]
    assert report.to_dict()["graphs"][0]["graphs"] == 1
    assert "batch size 8: 1 graph compiled" in str(report)


def test_a_graph_that_fails_is_fatal_where_it_is_said_so() -> None:
    def none(size: int) -> tuple[Any, ...]:
        return (torch.ones(size, 127, dtype=torch.bfloat16),)

    model = compiled(Model(), dynamic=True)
    model(*inputs(8))
    with pytest.warns(UserWarning, match="no GPU here"):
        report = compile_ext.warmup(model, batch_sizes=(8,), inputs=none, progress=False)
    assert "failed" in str(report)
    with (
        pytest.warns(UserWarning, match="no GPU here"),
        pytest.raises(WarmupError, match="graph of batch size 8: "),
    ):
        compile_ext.warmup(model, batch_sizes=(8,), inputs=none, progress=False, strict=True)


class NeedsData(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


def test_a_model_that_needs_data_is_warned_of() -> None:
    # Nothing can be compiled here: the kernels of the plan need compilers, not a GPU.
    with pytest.warns(UserWarning, match="could not be seen before they ran"):
        report = compile_ext.warmup(
            compiled(NeedsData(), dynamic=True),
            batch_sizes=(8,),
            inputs=inputs,
            progress=False,
            target=H200,
            budget_seconds=0.0,
        )
    assert [x.reason for x in report.graphs] == [""]


@pytest.mark.parametrize(
    ("sizes", "given", "said"),
    [
        ((8,), None, "a model, batch_sizes=(8,) and no inputs"),
        ((), inputs, "a model, no batch_sizes and inputs"),
        ((0,), inputs, "batch_sizes=(0,)"),
        ((2.5,), inputs, "batch_sizes=(2.5,)"),
    ],
)
def test_sizes_and_inputs_go_together(sizes: Any, given: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        compile_ext.warmup(Model(), batch_sizes=sizes, inputs=given, progress=False)
    assert said in str(caught.value)


def test_a_manifest_has_no_graphs() -> None:
    with pytest.raises(ArgumentError, match="a manifest, batch_sizes"):
        compile_ext.warmup(compile_ext.Manifest(), batch_sizes=(1,), inputs=inputs, progress=False)
