"""prefetch_weights: which kernels may fetch their weight before the one in front has ended."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import compile_ext
from compile_ext.layers import BlockFp8Linear
from compile_ext.ops import block_scaled_mm, quantize_fp8_blocks, triton_support

PASS = "prefetch_weights"
K = 128
FIRED = (True, "a kernel that can fetches the weight before its PDL wait")
FIRST = (False, "what ran before the graph may still write the weight")


@pytest.fixture(autouse=True)
def pdl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU had programmatic dependent launch; its reference ignores the flag."""
    monkeypatch.setattr(triton_support, "has_pdl", lambda x: True)


class Model(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.one = BlockFp8Linear(torch.randn(K, K))
        self.two = BlockFp8Linear(torch.randn(K, K))
        self.three = BlockFp8Linear(torch.randn(K, K))

    def forward(self, *args: Tensor) -> Any:
        return self.body(self, *args)


def tokens(m: int) -> Tensor:
    return torch.randn(m, K).bfloat16()


def test_a_chain(rewrite: Any) -> None:
    got = rewrite(Model(lambda self, x: self.two(self.one(x))), tokens(1))
    assert got.of(PASS) == [FIRST, FIRED]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[1, 128]
arg1: float8_e4m3fn[128, 128]
arg2: float32[1, 1]
arg3: float8_e4m3fn[128, 128]
arg4: float32[1, 1]
%0: bfloat16[1, 128] = .reshape(arg0, -1, 128)
%1: bfloat16[1, 128] = compile_ext::block_scaled_mm_m1(%0, arg1, None, arg2, None, bfloat16)
%2: bfloat16[1, 128] = .view(%1, 1, 128)
%3: bfloat16[1, 128] = .reshape(%2, -1, 128)
%4: bfloat16[1, 128] = compile_ext::block_scaled_mm_m1(%3, arg3, None, arg4, None, bfloat16, True)
%5: bfloat16[1, 128] = .view(%4, 1, 128)
return [%5]""",
    )


def test_behind_a_norm_and_router_without_a_residual(rewrite: Any) -> None:
    """Its sum has no elements: one result that has some shows that a kernel runs."""

    def body(self: Model, x: Tensor) -> Tensor:
        op = torch.ops.compile_ext.rms_norm_router
        y, _, _ = op(x, None, None, 1e-6, False, self.body_weight, None)
        return self.one(y)

    model = Model(body)
    model.body_weight = nn.Parameter(torch.randn(16, K).bfloat16(), requires_grad=False)
    got = rewrite(model, tokens(1))
    assert sorted(got.of(PASS)) == [FIRST, FIRED]
    assert "rms_norm_router(arg1, None, None, 1e-06, False, arg0, None)" in got.graph
    assert "None, bfloat16, True)" in got.graph


@pytest.mark.parametrize("m", [1, 3])
def test_dependence_counts_and_not_position(rewrite: Any, m: int) -> None:
    """The compiler may put either of two independent calls first."""

    def body(self: Model, x: Tensor) -> Tensor:
        a, b = self.one(x), self.two(x)
        return self.three(a.relu() + b)

    assert rewrite(Model(body), tokens(m)).of(PASS) == [FIRST, FIRST, FIRED]


def test_a_dynamic_number_of_tokens(rewrite: Any) -> None:
    model = Model(lambda self, x: self.two(self.one(x)))
    got = rewrite(model, tokens(5), dynamic=True)
    assert got.of(PASS) == [FIRST, FIRED]


def test_not_behind_a_call_that_may_launch_nothing(rewrite: Any) -> None:
    def body(self: Model, x: Tensor, chosen: Tensor) -> Tensor:
        few = self.one(x[chosen])  # none, if no token is chosen
        return self.two(x + few.sum(0))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = rewrite(Model(body), tokens(3), torch.tensor([True, False, True]))
    assert got.of(PASS) == [FIRST, FIRST]


def test_a_weight_that_the_graph_writes(rewrite: Any) -> None:
    def body(self: Model, x: Tensor) -> Tensor:
        x = self.one(x)
        with torch.no_grad():
            self.two.weight_scale.mul_(1.0)
        return self.two(x)

    got = rewrite(Model(body), tokens(1))
    assert got.of(PASS) == [FIRST, (False, "the graph writes scale_b")]


def test_a_weight_that_the_graph_computes(rewrite: Any) -> None:
    """An adapter that is merged on each call: the kernel in front may still be writing the sum."""

    def body(self: Model, x: Tensor, adapter: Tensor) -> Tensor:
        x = self.one(x)
        w, scale = quantize_fp8_blocks(self.two.weight.float() + adapter)
        return block_scaled_mm(x, w, None, scale)

    got = rewrite(Model(body), tokens(1), torch.randn(K, K))
    assert got.of(PASS) == [FIRST, (False, "b is not an input of the graph")]
    skipped = (False, "b is not an input of the graph")
    assert got.of("specialize_m1")[1] == skipped


def test_in_the_body_of_another_op(rewrite: Any) -> None:
    """What runs before the body is not seen from inside."""

    def body(self: Model, x: Tensor) -> Any:
        inner = lambda y: self.three(self.two(y))  # noqa: E731
        return checkpoint(inner, self.one(x), use_reentrant=False)

    got = rewrite(Model(body), tokens(1))
    assert sorted(got.of(PASS)) == [FIRST, FIRST, FIRED]


def test_off(rewrite: Any) -> None:
    options = {"compile_ext.disable": [PASS]}
    model = Model(lambda self, x: self.two(self.one(x)))
    got = rewrite(model, tokens(1), options=options)
    assert got.of(PASS) == []
    assert "True" not in got.graph


def test_without_the_option_nothing_starts_early(rewrite: Any) -> None:
    op = torch.ops.compile_ext.block_scaled_mm

    def body(self: Model, x: Tensor) -> Tensor:
        three = self.three
        y = self.two(self.one(x))
        return op(y, three.weight, None, three.weight_scale, None, torch.bfloat16, True)

    got = rewrite(Model(body), tokens(3), options={"compile_ext.pdl": False})
    assert got.of(PASS) == [(False, "compile_ext.pdl is False")] * 3
    assert "True" not in got.graph


def test_nothing_is_looked_at_without_pdl(rewrite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "has_pdl", lambda x: False)
    got = rewrite(Model(lambda self, x: self.two(self.one(x))), tokens(1))
    assert got.of(PASS) == []


def test_a_call_that_says_so_itself(rewrite: Any) -> None:
    op = torch.ops.compile_ext.block_scaled_mm

    def body(self: Model, x: Tensor) -> Tensor:
        two = self.two
        return op(self.one(x), two.weight, None, two.weight_scale, None, torch.bfloat16, True)

    got = rewrite(Model(body), tokens(1))
    assert got.of(PASS) == [FIRST, (False, "the call says so itself")]


def between(self: Model, x: Tensor, use: Any) -> Tensor:
    return self.two(use(self.one(x), x))


def accumulated(h: Tensor, x: Tensor) -> Tensor:
    total = h.new_zeros(h.shape)
    total += x
    return total


def overwritten(h: Tensor, x: Tensor) -> Tensor:
    h[:] = x * 2
    return h


@pytest.mark.parametrize(
    "use",
    [
        lambda h, x: torch.zeros_like(h) + x,
        accumulated,
        lambda h, x: h.copy_(x),
        overwritten,
        lambda h, x: torch.cat([h[:0], x]),
        lambda h, x: h.fill_(1.0),
        lambda h, x: x[: h.size(0)],
    ],
    ids=["zeros_like", "new_zeros", "copy_", "setitem", "no elements", "fill_", "size"],
)
def test_a_call_that_the_compiler_leaves_out_starts_no_chain(rewrite: Any, use: Any) -> None:
    got = rewrite(Model(lambda self, x: between(self, x, use)), tokens(3))
    assert (True, FIRED[1]) not in got.of(PASS)


@pytest.mark.parametrize(
    "use",
    [
        lambda h, x: h.relu() + x,
        lambda h, x: torch.cat([h, x])[:3],
        lambda h, x: F.rms_norm(h, (K,)),
        lambda h, x: F.scaled_dot_product_attention(*(h[None, None],) * 3)[0, 0],
        lambda h, x: torch.cat([*h.chunk(2, -1)][::-1], -1),
    ],
    ids=["pointwise", "cat", "norm", "attention", "chunk"],
)
def test_what_computes_with_its_numbers_continues_the_chain(rewrite: Any, use: Any) -> None:
    # Eager's attention and the graph's may differ in the last bit of bfloat16, 2^-8 of a value.
    got = rewrite(Model(lambda self, x: between(self, x, use)), tokens(3), tolerance=2.0**-2)
    assert got.of(PASS) == [FIRST, FIRED]


def test_a_call_without_columns_starts_no_chain(rewrite: Any) -> None:
    op = torch.ops.compile_ext.block_scaled_mm

    def body(self: Model, x: Tensor) -> Tensor:
        w, scale = self.one.weight[:0], self.one.weight_scale[:0]
        empty = op(x, w, None, scale, None, torch.bfloat16)
        return self.two(torch.cat([empty, x], 1))

    assert rewrite(Model(body), tokens(3)).of(PASS) == [FIRST, FIRST]


def test_a_first_call_that_prefetches_itself_starts_no_chain(rewrite: Any) -> None:
    op = torch.ops.compile_ext.block_scaled_mm

    def body(self: Model, x: Tensor) -> Tensor:
        one = self.one
        h = op(x, one.weight, None, one.weight_scale, None, torch.bfloat16, True)
        return self.two(h)

    got = rewrite(Model(body), tokens(3))
    assert got.of(PASS) == [(False, "the call says so itself"), FIRST]


# ---- norms, and weights that the graph writes ----------------------------------------------------

OPS = torch.ops.compile_ext


class Normed(nn.Module):
    """``body(self, *activations)`` with a norm's weight, a router's, and an adapter for each."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.norm = nn.Parameter(torch.randn(K).bfloat16(), requires_grad=False)
        self.router = nn.Parameter(torch.randn(8, K).bfloat16(), requires_grad=False)

    def forward(self, *activations: Tensor) -> Any:
        return self.body(self, *activations)


def test_a_norm_starts_a_chain_and_is_behind_one(rewrite: Any) -> None:
    def body(self: Normed, x: Tensor) -> Tensor:
        first = OPS.rms_norm(x, self.norm, 1e-6, True)
        y, total = OPS.add_rms_norm(first, x, self.norm, 1e-6, True)
        return y * total

    got = rewrite(Normed(body), tokens(1))
    assert got.of(PASS) == [FIRST, FIRED]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[128]
arg1: bfloat16[1, 128]
%0: bfloat16[1, 128] = compile_ext::rms_norm(arg1, arg0, 1e-06, True)
%1 = compile_ext::add_rms_norm(%0, arg1, arg0, 1e-06, True, True)
%2: bfloat16[1, 128] = getitem(%1, 0)
%3: bfloat16[1, 128] = getitem(%1, 1)
%4: bfloat16[1, 128] = mul(%2, %3)
return [%4]""",
    )


def test_a_norm_without_a_weight_may_start_early(rewrite: Any) -> None:
    def body(self: Normed, x: Tensor) -> Any:
        return OPS.rms_norm(OPS.rms_norm(x, None, 1e-6, True), None, 1e-6, True)

    assert rewrite(Normed(body), tokens(1)).of(PASS) == [FIRST, FIRED]


@pytest.mark.parametrize("quantized", [False, True])
def test_a_norm_whose_weight_the_graph_computes(rewrite: Any, quantized: bool) -> None:
    op = OPS.rms_norm_quantize_fp8 if quantized else OPS.rms_norm

    def body(self: Normed, x: Tensor, scale: Tensor) -> Any:
        first = OPS.rms_norm(x, self.norm, 1e-6, True)
        return op(first, self.norm * scale, 1e-6, True)

    got = rewrite(Normed(body), tokens(1), tokens(1)[0])
    assert got.of(PASS) == [FIRST, (False, "weight is not an input of the graph")]


def in_place(self: Normed, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return self.norm.add_((a @ b)[0]), self.router.add_(a @ b)


def out_of_place(self: Normed, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return self.norm + (a @ b)[0], self.router + a @ b


@pytest.mark.parametrize(
    ("merge", "reason"),
    [(in_place, "the graph writes {}"), (out_of_place, "{} is not an input of the graph")],
    ids=["in place", "out of place"],
)
def test_adapters_that_are_merged_in_the_graph(merge: Any, reason: str) -> None:
    """LoRA, ``w + A @ B`` on each call: nothing reads w before that has ended."""

    def body(self: Normed, x: Tensor, a: Tensor, b: Tensor) -> Any:
        norm, router = merge(self, a, b)
        y = OPS.rms_norm(OPS.rms_norm(x, None, 1e-6, True), norm, 1e-6, True)
        return OPS.router_gemm(y, router, None)

    model = Normed(body)
    plain = copy.deepcopy(model)
    # Small integers: their products and sums are exact in any order.
    a, b = (torch.randint(-2, 3, shape).bfloat16() for shape in ((8, 4), (4, K)))
    compiled = torch.compile(model, backend="compile_ext")
    with torch.no_grad():
        for _ in range(3):  # in place, each call adds to the weights
            x = tokens(1)
            assert torch.equal(compiled(x, a, b), plain(x, a, b))
    said = {
        (d.pass_name, d.fired, d.detail)
        for row in compile_ext.explain(compiled).rows
        for d in row.decisions
    }
    assert (PASS, False, reason.format("weight")) in said
    assert ("specialize_m1", False, reason.format("b")) in said
    assert not any(fired for name, fired, _ in said if name in (PASS, "specialize_m1"))
