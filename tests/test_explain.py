"""explain: every candidate by module path, every fallback by frame, as a table and as a dict."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import compile_ext
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import rms_norm
from compile_ext.ops.errors import NotCompiledError
from compile_ext.passes import Decision
from compile_ext.report import Fallback, Report, Row

EAGER: dict[str, Any] = {"compile_ext.inner": "eager"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = BlockFp8Linear(torch.randn(64, 64))
        self.down = ChannelFp8Linear(torch.randn(50, 64))
        self.gate = nn.Linear(64, 8, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).float().softmax(-1)
        return F.pad(self.down(self.up(x)), (0, 14)) * weights[:, :1].to(x.dtype)


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class NoParameters(nn.Module):
    """Its records are found by the lines of their code."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


TWO_LAYERS = {f"layers.{i}.{name}" for i in range(2) for name in ("up", "down", "gate")}


def tokens(m: int) -> Tensor:
    return torch.randn(m, 64).bfloat16()


def call(model: Any, m: int, **arguments: Any) -> Any:
    compiled = torch.compile(model, backend="compile_ext", options=EAGER, **arguments)
    with torch.no_grad():
        compiled(tokens(m))
    return compiled


def test_table() -> None:
    model = Model()
    call(model, 1)
    text = "\n".join(line.rstrip() for line in str(compile_ext.explain(model)).splitlines())
    assert_expected_inline(
        text,
        """\
9 candidates in 1 graph (* fired, - left alone)
+-----------------+--------------------+---+----+----+-----------+-------------------------------------------------------------------------+
| module          | op                 | M |  N |  K | kernel    | decisions                                                               |
+-----------------+--------------------+---+----+----+-----------+-------------------------------------------------------------------------+
| layers.0-2.down | scaled_mm          | 1 | 64 | 64 | reference | * fold_weight_padding: N 50 -> 64: b, scale_b padded                    |
|                 |                    |   |    |    |           |   weight: re-homed: the parameter lives in it                           |
|                 |                    |   |    |    |           | - kernel aten, triton: runs on CUDA, the tensors are on cpu             |
+-----------------+--------------------+---+----+----+-----------+-------------------------------------------------------------------------+
| layers.0-2.gate | router_gemm_m1     | 1 |  8 | 64 | reference | * lower_router_linear: logits stay in float32                           |
|                 |                    |   |    |    |           | * specialize_m1: M == 1: compile_ext::router_gemm_m1                    |
|                 |                    |   |    |    |           | - kernel cute, triton_small_m: runs on CUDA, the tensors are on cpu     |
|                 |                    |   |    |    |           | - kernel aten: torch.mm(out_dtype=) runs on CUDA, the tensors are on    |
|                 |                    |   |    |    |           | cpu                                                                     |
+-----------------+--------------------+---+----+----+-----------+-------------------------------------------------------------------------+
| layers.0-2.up   | block_scaled_mm_m1 | 1 | 64 | 64 | reference | - fold_weight_padding: N=64, K=64 need no padding                       |
|                 |                    |   |    |    |           | * specialize_m1: M == 1: compile_ext::block_scaled_mm_m1                |
|                 |                    |   |    |    |           | - kernel triton_small_m, deep_gemm, aten, triton: runs on CUDA, the     |
|                 |                    |   |    |    |           | tensors are on cpu                                                      |
+-----------------+--------------------+---+----+----+-----------+-------------------------------------------------------------------------+""",
    )


def test_dict_is_plain_data() -> None:
    model = Model(1)
    data = compile_ext.explain(call(model, 5)).to_dict()
    row = next(r for r in data["rows"] if r["module"] == "layers.0.down")
    assert row["site"]["n"] == 64
    assert row["decisions"] == (
        {
            "pass_name": "fold_weight_padding",
            "fired": True,
            "detail": "N 50 -> 64: b, scale_b padded",
        },
    )
    json.dumps(data)


def test_model_and_compiled_say_the_same() -> None:
    model = Model(1)
    compiled = call(model, 5)
    assert compile_ext.explain(model) == compile_ext.explain(compiled)


def test_rows_add_up_over_graphs_and_repeat_nothing() -> None:
    model = Model(2)
    call(model, 5)
    before = {(r.module, r.site.m) for r in compile_ext.explain(model).rows if r.site}
    call(model, 5, dynamic=False)
    call(model, 1)
    after = {(r.module, r.site.m) for r in compile_ext.explain(model).rows if r.site}
    assert after == before | {(name, (1, 1)) for name, _ in before}
    assert len([r for r in compile_ext.explain(model).rows if r.site]) == len(after)


def test_with_arguments_it_compiles_only_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx as module

    monkeypatch.setattr(module, "compile_fx", None)  # a call would raise
    model = Model(2)
    with torch.no_grad():
        report = compile_ext.explain(model, tokens(1))
        again = compile_ext.explain(model, tokens(1))
    assert {r.module for r in report.rows} == TWO_LAYERS
    assert again == report


def test_without_arguments_on_something_never_called() -> None:
    with pytest.raises(NotCompiledError) as error:
        compile_ext.explain(torch.compile(Model(1), backend="compile_ext"))
    assert "call the compiled model once" in error.value.fix
    assert "Model" in error.value.found


@pytest.mark.parametrize("parameters", [True, False])
def test_after_a_reset_nothing_is_compiled(parameters: bool) -> None:
    """Also where the graph waits for the garbage collector: it is part of cycles."""
    model = Model(1) if parameters else NoParameters()
    gc.disable()
    try:
        call(model, 5)
        torch._dynamo.reset()
        with pytest.raises(NotCompiledError):
            compile_ext.explain(model)
    finally:
        gc.enable()


def test_tied_weights_have_their_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 8, bias=False).bfloat16()
            self.second = nn.Linear(64, 8, bias=False).bfloat16()
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).float().softmax(-1) + self.second(x).float().softmax(-1)

    model = Tied()
    call(model, 5)
    assert {r.module for r in compile_ext.explain(model).rows} == {"first"}


def test_function_over_a_module_and_a_tensor() -> None:
    layer, weight = Layer(), torch.randn(8, 64).bfloat16()

    def run(x: Tensor) -> Tensor:
        return layer(x) + F.linear(x, weight).float().softmax(-1).sum()

    compiled = call(run, 5)
    modules = {r.module for r in compile_ext.explain(compiled).rows}
    assert modules == {"layer.up", "layer.down", "layer.gate", "weight"}


def test_frames_that_fell_back_to_eager() -> None:
    class Loop(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()  # in a loop: Dynamo gives this frame up
            return x

    model = Loop(2)
    call(model, 5)
    report = compile_ext.explain(model)
    eager = [f for f in report.fallbacks if f.kind == "eager"]
    assert len(eager) == 1
    assert "in forward" in eager[0].where
    assert "graph_break" in eager[0].reason
    assert {r.module for r in report.rows if r.site} == TWO_LAYERS
    assert eager[0].where in str(report)


def test_frames_past_the_recompile_limit() -> None:
    model = Layer()
    with torch._dynamo.config.patch(recompile_limit=2):
        compiled = torch.compile(model, backend="compile_ext", options=EAGER, dynamic=False)
        with torch.no_grad():
            for m in range(2, 7):
                compiled(tokens(m))
    report = compile_ext.explain(model)
    assert report.graphs == 2
    assert [f.reason for f in report.fallbacks if f.kind == "eager"] == [
        "Dynamo recompile limit exceeded"
    ]


def test_other_models_frames_are_not_mine() -> None:
    class Skipped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                torch._dynamo.graph_break()
            return x

    model = Model(1)
    call(Skipped(), 5)
    call(model, 5)
    assert compile_ext.explain(model).fallbacks == ()


def test_times_cover_the_whole_compilation() -> None:
    model = Model(1)
    report = compile_ext.explain(call(model, 5))
    whole = torch._dynamo.utils.get_compilation_metrics()[-1].entire_frame_compile_time_s
    assert report.compile_seconds == whole
    assert 0 < report.pass_seconds < report.compile_seconds


def test_function_of_its_arguments_alone() -> None:
    """Both factors are handed in: the row is named by the graph, and the graph is found by its
    place."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            a,
            b,
            scale_a=a.new_ones((), dtype=torch.float32),
            scale_b=a.new_ones((), dtype=torch.float32),
        )

    a = torch.randn(32, 64).to(torch.float8_e4m3fn)
    b = torch.randn(48, 64).to(torch.float8_e4m3fn).t()
    with torch.no_grad():
        compiled = torch.compile(
            product, backend="compile_ext", options={"compile_ext.inner": "eager"}
        )
        compiled(a, b)
    (row,) = compile_ext.explain(compiled).rows
    assert (row.module, row.op) == ("_scaled_mm", "_scaled_mm")
    assert row.site is not None
    assert (row.site.n, row.site.k) == (48, 64)


def test_a_graph_without_weights_under_inductor() -> None:
    def norm(x: Tensor) -> Tensor:
        return rms_norm(x.relu())

    with torch.no_grad():
        compiled = torch.compile(norm, backend="compile_ext")
        compiled(torch.randn(2, 8))
    assert compile_ext.explain(compiled).graphs == 1


def test_brackets_are_printed() -> None:
    text = "b of shape [n, k]: pip install 'compile-ext[cuda]'"
    row = Row("experts[gate]", "mylib::op", None, (Decision("a_pass", False, text),))
    report = Report((row,), (Fallback("a.py:1 in f", "graph break", text),), 1, 0.0, 0.0, (), False)
    assert "experts[gate]" in str(report)
    assert str(report).count(text) == 2
