"""``sites`` and ``collect``: every call of every graph of a model, once, by module path."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from manifest_model import H200, Layer, Model, modules, on_h200, tokens
from torch import Tensor, nn

import compile_ext
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import block_scaled_mm, quantize_fp8_blocks, rms_norm
from compile_ext.ops.device import Target, as_if_on
from compile_ext.ops.errors import NotCompiledError

EAGER: dict[str, Any] = {"compile_ext.inner": "eager"}
LAYERS = {
    "block_scaled_mm": [
        *("layers.0.down_proj", "layers.1.down_proj", "layers.0.o_proj", "layers.1.o_proj"),
        *("layers.0.gate_up_proj", "layers.1.gate_up_proj"),
    ],
    "router_gemm": ["layers.0.gate", "layers.1.gate"],
    "scaled_mm": ["lm_head"],
}


def ranges(manifest: compile_ext.Manifest) -> set[tuple[int, int | None]]:
    return {site.call.m for site in manifest.sites}


def test_every_call_of_a_layer_as_on_a_gpu() -> None:
    manifest = on_h200(2, 5)
    assert modules(manifest) == {
        **LAYERS,
        "column_major": [
            *("layers.0.down_proj", "layers.0.gate_up_proj", "layers.1.down_proj"),
            *("layers.1.gate_up_proj", "layers.0.o_proj", "layers.1.o_proj"),
        ],
        "rms_norm": ["layers.0.norm", "layers.1.norm"],
        "router_topk": ["layers.0", "layers.1"],
    }
    assert ranges(manifest) == {(2, 4096)}
    assert manifest.not_covered == ()
    shapes = [(s.call.n, s.call.k) for s in manifest.sites if s.call.n is not None]
    assert shapes == [(256, 256), (256, 512), (512, 256), (8, 256), (64, 512)]


def test_a_model_without_weights_gives_the_same_as_a_real_one() -> None:
    with torch.device("meta"):
        empty = Model()
    with torch.no_grad():
        real = compile_ext.collect(Model(), tokens())
        assert compile_ext.collect(empty, tokens(5, "meta")) == real
    assert modules(real) == LAYERS


@pytest.mark.gpu
def test_a_model_without_weights_gives_the_same_as_one_on_this_gpu() -> None:
    with torch.device("meta"):
        empty = Model()
    with torch.no_grad():
        for m in (5, 1):
            real = compile_ext.collect(Model().cuda(), tokens(m, "cuda"))
            torch._dynamo.reset()
            assert compile_ext.collect(empty, tokens(m, "meta")) == real  # by itself as if here
            torch._dynamo.reset()


def test_one_token_is_a_graph_of_its_own() -> None:
    many, both = on_h200(1, 5), on_h200(1, 5, 1)
    assert ranges(both) == {(1, 1), (2, 4096)}
    one = [site for site in both.sites if site.call.m == (1, 1)]
    assert compile_ext.Manifest(tuple(one)).merge(many) == both
    assert {"block_scaled_mm_m1", "rms_norm_router"} <= set(modules(compile_ext.Manifest((*one,))))


def test_graphs_compiled_for_another_gpu_are_not_among_them() -> None:
    with torch.device("meta"):
        model = Model(1)
    with torch.no_grad():
        with as_if_on(H200):
            hopper = compile_ext.collect(model, tokens(5, "meta"))
        with as_if_on(Target((8, 0), "NVIDIA A100")):
            ampere = compile_ext.collect(model, tokens(5, "meta"))
        cpu = compile_ext.collect(model, tokens(5, "meta"))
        with as_if_on(H200):
            assert compile_ext.sites(model) == hopper
    assert "column_major" in modules(hopper)
    assert "column_major" not in modules(cpu)
    assert hopper != ampere


@pytest.mark.parametrize(
    ("options", "prefetch", "pinned"),
    [
        ({}, True, None),
        ({"compile_ext.pdl": False}, False, None),
        ({"triton.enable_pdl": True}, False, None),  # of Inductor, which compiles it later
        ({"compile_ext.kernels": {"scaled_mm": "triton"}}, True, "triton"),
        ({"compile_ext.batch_invariant": True}, True, "batch_invariant"),
        ({"compile_ext.disable": {"prefetch_weights"}, "compile_ext.mode": "default"}, False, None),
    ],
)
def test_a_look_has_the_options_of_the_model(
    options: dict[str, Any], prefetch: bool, pinned: str | None
) -> None:
    """With others, other kernels run, or are launched in another way, which is compiled anew."""
    with torch.device("meta"):
        model = Model(1)
    compiled = torch.compile(model, backend="compile_ext", options=options)
    with torch.no_grad(), as_if_on(H200):
        manifest = compile_ext.collect(compiled, tokens(5, "meta"))
    arguments = {s.modules[0]: dict(s.call.arguments) for s in manifest.sites}
    assert arguments["layers.0.norm"]["prefetch"] is prefetch
    assert arguments["lm_head"]["pinned"] == pinned


def test_what_compiled_code_calls() -> None:
    model = Model(1)
    compiled = torch.compile(model, backend="compile_ext", options=EAGER)
    with torch.no_grad():
        compiled(tokens())
        assert compile_ext.sites(compiled) == compile_ext.sites(model)
        assert compile_ext.sites(model) == compile_ext.collect(Model(1), tokens())


class Broken(nn.Module):
    """Two graphs, between which Dynamo gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (ChannelFp8Linear(torch.randn(n, 32)) for n in (32, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_graph_breaks_add_up() -> None:
    with torch.no_grad():
        manifest = compile_ext.collect(Broken(), torch.randn(5, 32))
    assert [(s.modules, s.call.n) for s in manifest.sites] == [(("first",), 32), (("second",), 64)]


def test_a_weight_of_a_call_that_is_dead() -> None:
    """``experts[i]``: a view that no one holds when one asks."""

    def expert(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return block_scaled_mm(x, weight, None, scale)

    pairs = [quantize_fp8_blocks(torch.randn(64, 128)) for _ in range(2)]
    weights = torch.stack([q.view(torch.uint8) for q, _ in pairs]).view(torch.float8_e4m3fn)
    scales, x = torch.stack([scale for _, scale in pairs]), torch.randn(5, 128).bfloat16()
    compiled = torch.compile(expert, backend="compile_ext", options=EAGER)
    for i in range(2):
        compiled(x, weights[i], scales[i])
    (site,) = compile_ext.sites(compiled).sites
    assert (site.call.n, site.call.k, site.call.m) == (64, 128, (5, 5))


class Stored(nn.Module):
    """A weight that is stored as bytes, and seen as FP8 before a graph break."""

    def __init__(self) -> None:
        super().__init__()
        q, scale = quantize_fp8_blocks(torch.randn(64, 128))
        self.weight = nn.Parameter(q.view(torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(torch.float8_e4m3fn)
        torch._dynamo.graph_break()
        return block_scaled_mm(x, weight, None, self.scale)


def test_a_view_from_in_front_of_a_graph_break() -> None:
    first, second, x = Stored(), Stored(), torch.randn(5, 128).bfloat16()
    compiled = torch.compile(first, backend="compile_ext", options=EAGER)
    compiled(x)
    for found in (compile_ext.sites(compiled), compile_ext.collect(second, x)):
        assert [(s.call.n, s.call.k) for s in found.sites] == [(64, 128)]


class Wrapped(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.proj = BlockFp8Linear(torch.randn(n, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class WrappedAndBroken(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_the_models_that_a_function_is_handed() -> None:
    around, x = Wrapped(320), torch.randn(5, 128).bfloat16()

    def step(model: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
        return model(x) * scale

    def behind(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x), around(x)

    class Runner:
        def step(self, model: nn.Module, x: Tensor) -> Tensor:
            return model(x)

    with_scale, first = functools.partial(step, scale=2.0), Wrapped(64)
    for function in (step, behind, Runner().step, with_scale):
        for model in (Wrapped(192), WrappedAndBroken(192)):
            found = {s.call.n: s.modules for s in compile_ext.collect(function, model, x).sites}
            assert found.pop(192) == ("0.proj",)
            assert found == ({320: ("around.proj",)} if function is behind else {})
    named = compile_ext.collect(step, model=first, x=x)
    assert [s.modules for s in named.sites] == [("model.proj",)]
    assert "0.proj" in str(compile_ext.explain(step, first, x))

    # Called as what is around the function is.
    def both(around: nn.Module, model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        return around(x), model(x)

    bound = compile_ext.collect(functools.partial(both, first), around, x)
    assert {s.call.n: s.modules for s in bound.sites} == {64: ("0.proj",), 320: ("0.proj",)}
    # A parameter is what the caller hands in too.
    weights = first.proj.weight, first.proj.weight_scale
    parts = compile_ext.collect(lambda x, w, s: block_scaled_mm(x, w, None, s), x, *weights)
    assert [(s.call.n, s.modules) for s in parts.sites] == [(64, ("1",))]


def test_a_function_that_was_handed_its_model_is_asked_for_the_model() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    model, x = WrappedAndBroken(64), torch.randn(5, 128).bfloat16()
    compiled = torch.compile(step, backend="compile_ext", options=EAGER)
    compiled(model, x)
    with pytest.raises(NotCompiledError, match=r"; sites\(model\) finds the graphs of a model"):
        compile_ext.sites(compiled)
    assert [s.modules for s in compile_ext.sites(model).sites] == [("proj",)]


def test_decorated_methods_and_partials() -> None:
    class Runner:
        def __init__(self) -> None:
            self.model = Wrapped(64)

        @torch.inference_mode()
        def step(self, x: Tensor) -> Tensor:
            return self.model(x)

    runner, x = Runner(), torch.randn(5, 128).bfloat16()
    for function, path in (
        (runner.step, "model.proj"),
        (functools.partial(runner.step, x), "model.proj"),
        (functools.partial(lambda model, x: model(x), runner.model), "0.proj"),
    ):
        args = () if isinstance(function, functools.partial) and function.args[0] is x else (x,)
        assert [s.modules for s in compile_ext.collect(function, *args).sites] == [(path,)]


def test_a_method_of_a_module_of_torch() -> None:
    model, x = nn.Sequential(BlockFp8Linear(torch.randn(64, 128))), torch.randn(5, 128).bfloat16()
    compiled = torch.compile(model.forward, backend="compile_ext", options=EAGER)
    compiled(x)
    assert [s.modules for s in compile_ext.sites(compiled).sites] == [("0",)]


def test_scales_that_are_powers_of_two_take_any_number_of_tokens() -> None:
    layer = BlockFp8Linear(torch.randn(64, 256), use_ue8m0=True)
    x = torch.randn(16, 256).bfloat16()
    torch._dynamo.mark_dynamic(x, 0, min=2, max=8192)
    found = compile_ext.collect(layer, x)
    assert ranges(found) == {(2, 8192)}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_one_graph_for_all_layers() -> None:
    model = nn.Sequential(*(ChannelFp8Linear(torch.randn(32, 32)) for _ in range(11)))
    for layer in model:
        layer.compile(backend="compile_ext", options=EAGER)
    with torch.no_grad():
        model(torch.randn(5, 32))
    (site,) = compile_ext.sites(model).sites
    assert site.modules == tuple(map(str, range(11)))  # by number: 2 before 10


def test_two_models_with_one_graph_never_mix() -> None:
    first, second = Model(1), Model(1)
    second.lm_head = ChannelFp8Linear(torch.randn(34, 512))
    with torch.no_grad():
        for model in (first, second):
            torch.compile(model, backend="compile_ext", options=EAGER)(tokens())
    sizes = [
        {s.call.n for s in compile_ext.sites(m).sites if "lm_head" in s.modules}
        for m in (first, second)
    ]
    assert sizes == [{64}, {48}]  # padded to 16 columns
    assert len(compile_ext.sites(first).sites) == len(compile_ext.sites(second).sites) == 5


def test_ranges_of_equal_calls_stay_apart() -> None:
    model = ChannelFp8Linear(torch.randn(32, 32))
    with torch.no_grad():
        for m in (5, 1):
            manifest = compile_ext.collect(model, torch.randn(m, 32))
    assert ranges(manifest) == {(5, 5), (1, 1)}
    x = torch.randn(7, 32)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    with torch.no_grad():
        assert ranges(compile_ext.collect(model, x)) == {(5, 5), (1, 1), (1, None)}


def test_nothing_compiled() -> None:
    said = r"sites: found Layer with no live compilation .* fix: call the compiled model once, or"
    with pytest.raises(NotCompiledError, match=said):
        compile_ext.sites(Layer())


def test_explain_shows_the_same_as_without_the_calls() -> None:
    """A norm that no pass has said anything of is no candidate."""

    def norm(x: Tensor) -> Tensor:
        return rms_norm(x)

    x = torch.randn(5, 8)
    assert len(compile_ext.collect(norm, x).sites) == 1
    assert compile_ext.explain(norm).rows == ()
