"""fold_weight_padding on GEMMs whose contract asks for alignment; strides stay eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compile_ext.backend import compile_ext_backend
from compile_ext.derived import constants
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import (
    block_scaled_mm,
    quantize_fp8_groups,
    quantize_fp8_per_token,
    scaled_mm,
)
from compile_ext.passes.derivation import Padding

# Sums of at most 16 products of size ~10, in another order: some units in the last place of float32
# (2^-23 * 16).
ROUNDING = 1e-5


PASS = "fold_weight_padding"
ops = torch.ops.compile_ext_tests


# Each spelling calls the third-party op on (x, w, scale, bias) with N = 6, K = 6: both break its
# alignment.
SPELLINGS = {
    "packet": lambda x, w, s, b: ops.gemm(x, w, s, b, True),
    "overload": lambda x, w, s, b: ops.gemm.default(x, w, s, b, True),
    "keyword": lambda x, w, s, b: ops.gemm(x=x, w=w, scale=s, bias=b, quantized=True),
    "mixed": lambda x, w, s, b: ops.gemm(x, w, quantized=True, bias=b, scale=s),
}


class Gemm(nn.Module):
    def __init__(self, call: Any, n: int = 6, k: int = 6, scale: tuple[int, ...] = (6,)) -> None:
        super().__init__()
        self.call = call
        self.w = nn.Parameter(torch.randn(n, k))
        self.s = nn.Parameter(torch.rand(scale) + 0.5)
        self.b = nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.w, self.s, self.b)


@pytest.mark.parametrize("call", SPELLINGS.values(), ids=SPELLINGS)
def test_alignment_in_every_spelling(rewrite: Any, call: Any) -> None:
    got = rewrite(Gemm(call), torch.randn(5, 6), tolerance=ROUNDING)
    assert got.of(PASS) == [(True, "N 6 -> 8, K 6 -> 8: bias, scale, w, x padded")]
    assert_expected_inline(
        got.graph,
        """\
arg3: float32[5, 6]
arg4: float32[8, 8] = pad([0, 2, 0, 2], 0)
arg5: float32[8] = pad([0, 2], 1)
arg6: float32[8] = pad([0, 2], 0)
%0: float32[5, 8] = pad(arg3, [0, 2], value=0)
%1: float32[5, 8] = compile_ext_tests::gemm(%0, arg4, arg5, arg6, True)
%2: float32[5, 6] = getitem(%1, [Ellipsis, slice(None, 6, None)])
%3: float32[5, 6] = .clone(%2, memory_format=contiguous_format)
return [%3]""",
    )


@pytest.mark.parametrize("m", [1, 5])
def test_every_size_dynamic(rewrite: Any, m: int) -> None:
    """K of the activation is a symbol there, which the fake of the op fixes to the weight's K."""
    x = torch.randn(m, 40).bfloat16()
    got = rewrite(ChannelFp8Linear(torch.randn(50, 40)), x, dynamic=True)
    fired = [detail for did, detail in got.of("fold_weight_padding") if did]
    assert fired == ["N 50 -> 64, K 40 -> 48: a, b, scale_b padded"]


def test_dynamic_m_makes_one_graph(rewrite: Any) -> None:
    model = Gemm(SPELLINGS["packet"])
    x = torch.randn(5, 6)
    torch._dynamo.mark_dynamic(x, 0)
    got = rewrite(model, x, tolerance=ROUNDING)
    assert_expected_inline(
        got.graph,
        """\
arg4: float32[s0, 6]
arg5: float32[8, 8] = pad([0, 2, 0, 2], 0)
arg6: float32[8] = pad([0, 2], 1)
arg7: float32[8] = pad([0, 2], 0)
%0: float32[s0, 8] = pad(arg4, [0, 2], value=0)
%1: float32[s0, 8] = compile_ext_tests::gemm(%0, arg5, arg6, arg7, True)
%2: float32[s0, 6] = getitem(%1, [Ellipsis, slice(None, 6, None)])
%3: float32[s0, 6] = .clone(%2, memory_format=contiguous_format)
return [%3]""",
    )
    with torch.no_grad():
        compiled = torch.compile(
            model, backend="compile_ext", options={"compile_ext.inner": "eager"}
        )
        for m in (3, 9):
            x = torch.randn(m, 6)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=ROUNDING)
    assert len(got.modules) == 1


def test_an_m_known_only_at_run_time(rewrite: Any) -> None:
    layer = BlockFp8Linear(torch.randn(50, 136))

    def expert(x: Tensor) -> Tensor:
        a, scale = quantize_fp8_groups(x[x[:, 0].nonzero()[:, 0]])  # the tokens of one expert
        return block_scaled_mm(a, layer.weight, scale, layer.weight_scale)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = rewrite(expert, torch.randn(5, 136).bfloat16(), tolerance=ROUNDING, fullgraph=True)
    assert got.of(PASS) == [(True, "N 50 -> 64, K 136 -> 144: a, b padded")]


def test_hand_pad_then_alignment_is_one_constant(rewrite: Any) -> None:
    class Both(Gemm):
        def forward(self, x: Tensor) -> Tensor:
            return ops.gemm(x, F.pad(self.w, (0, 0, 0, 4)), None, None, False)

    got = rewrite(Both(None, n=6, k=8), torch.randn(5, 8), tolerance=ROUNDING)
    assert_expected_inline(
        got.graph,
        """\
arg1: float32[5, 8]
arg2: float32[16, 8] = pad([0, 0, 0, 10], 0)
%0: float32[5, 16] = compile_ext_tests::gemm(arg1, arg2, None, None, False)
%1: float32[5, 10] = getitem(%0, [Ellipsis, slice(None, 10, None)])
%2: float32[5, 10] = .clone(%1, memory_format=contiguous_format)
return [%2]""",
    )


def test_transposed_weight_stays_column_major(rewrite: Any) -> None:
    class ColumnMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            return ops.gemm_nn(x, self.w.t(), x)

    got = rewrite(ColumnMajor(), torch.randn(5, 8), tolerance=ROUNDING)
    assert_expected_inline(
        got.graph,
        """\
arg1: float32[5, 8]
arg2: float32[8, 8] = pad([0, 0, 0, 2], 0)
%0: float32[8, 8] = .t(arg2)
%1: float32[5, 8] = compile_ext_tests::gemm_nn(arg1, %0, arg1)
%2: float32[5, 6] = getitem(%1, [Ellipsis, slice(None, 6, None)])
%3: float32[5, 6] = .clone(%2, memory_format=contiguous_format)
return [%3]""",
    )
    stored = Padding((0, 2), 0.0, keep_order=True)(
        torch.randn(6, 8).t()
    )  # a [k, n] weight that is stored column-major
    assert stored.shape == (8, 8)
    assert stored.stride() == (1, 8)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (1,), ()], ids=str)
def test_scale_of_every_form(rewrite: Any, shape: tuple[int, ...]) -> None:
    def call(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return ops.gemm(x, w, s if s.dim() < 2 else s[:, 0], b, True)

    got = rewrite(Gemm(call, scale=shape), torch.randn(5, 6), tolerance=ROUNDING)
    fired, detail = got.of(PASS)[0]
    assert fired
    assert ("scale" in detail) == (shape in [(6,), (6, 1)])


def test_two_dimensional_scale_is_padded_with_ones(rewrite: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w, scale = quantize_fp8_per_token(torch.randn(5, 16))
            self.w, self.scale = (nn.Parameter(t, requires_grad=False) for t in (w, scale))

        def forward(self, a: Tensor, scale_a: Tensor) -> Tensor:
            return scaled_mm(a, self.w, scale_a, self.scale)

    got = rewrite(Scaled(), *quantize_fp8_per_token(torch.randn(3, 16)))
    assert got.of(PASS) == [(True, "N 5 -> 16: b, scale_b padded")]
    assert "float32[16, 1] = pad([0, 0, 0, 11], 1)" in got.graph


def test_inside_a_checkpoint(rewrite: Any) -> None:
    class Checkpointed(Gemm):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    got = rewrite(Checkpointed(SPELLINGS["packet"]), torch.randn(5, 6), tolerance=ROUNDING)
    assert got.of(PASS) == [(True, "N 6 -> 8, K 6 -> 8: bias, scale, w, x padded")]


def test_shared_subgraph_gets_each_callers_weight(rewrite: Any) -> None:
    def gemm(x: Tensor, w: Tensor) -> Tensor:
        return ops.gemm(x, w, None, None, False)

    region: Any = torch.compiler.nested_compile_region(gemm)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList(torch.randn(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for w in self.layers:
                x = region(x, w)
            return x

    got = rewrite(Two(), torch.randn(5, 6), tolerance=ROUNDING)
    # One body, called three times: one decision, and a constant for each caller's weight.
    assert got.of(PASS) == [(True, "N 6 -> 8, K 6 -> 8: w, x padded")]
    derived = [
        line for line in got.graph.splitlines() if line.startswith("arg") and "= pad(" in line
    ]
    assert len(derived) == 3


def test_layer_compile_one_graph_for_eight_layers() -> None:
    layers = [Gemm(SPELLINGS["packet"]) for _ in range(8)]
    calls = []

    def backend(gm: Any, inputs: Any) -> Any:
        calls.append(gm)
        return compile_ext_backend(gm, inputs, options={"compile_ext.inner": "eager"})

    x = torch.randn(5, 6)
    with torch.no_grad():
        for layer in layers:
            layer.compile(backend=backend)
        for layer in layers:
            torch.testing.assert_close(layer(x), Gemm.forward(layer, x), rtol=0, atol=ROUNDING)
        assert len(calls) == 1
        table = constants(Padding((0, 2, 0, 2), 0.0, keep_order=True), [layers[0].w])
        before = table.refreshes
        for _ in range(3):
            for layer in layers:
                layer(x)
        assert table.refreshes == before  # steady state: nothing is padded again
        layers[3].w.mul_(2)
        torch.testing.assert_close(layers[3](x), Gemm.forward(layers[3], x), rtol=0, atol=ROUNDING)
        assert table.refreshes == before + 1


def test_idempotent(rewrite: Any) -> None:
    got = rewrite(Gemm(SPELLINGS["packet"]), torch.randn(5, 6), tolerance=ROUNDING)
    from compile_ext.passes import PassContext, run_passes

    before = got.graph
    again = PassContext(got.modules[-1], [torch.randn(1)] * 9)
    run_passes(again)
    assert got.graph == before


def test_not_when_aligned(rewrite: Any) -> None:
    got = rewrite(Gemm(SPELLINGS["packet"], n=8, k=8, scale=(8,)), torch.randn(5, 8))
    assert got.of(PASS) == [(False, "N=8, K=8 need no padding")]
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[8, 8]
arg1: float32[8]
arg2: float32[8]
arg3: float32[5, 8]
%0: float32[5, 8] = compile_ext_tests::gemm(arg3, arg0, arg1, arg2, True)
return [%0]""",
    )


def test_not_a_computed_weight(rewrite: Any) -> None:
    got = rewrite(
        lambda x, w: ops.gemm(x, w * 2, None, None, False), torch.randn(5, 6), torch.randn(6, 6)
    )
    assert got.of(PASS) == [(False, "it is computed in the graph, not a parameter or buffer")]


def test_not_an_activation_weight(rewrite: Any) -> None:
    got = rewrite(
        lambda x, w: ops.gemm(x, w, None, None, False), torch.randn(5, 6), torch.randn(6, 6)
    )
    assert got.of(PASS) == [(False, "it is an input of the call, not a parameter or buffer")]


def test_not_a_batch_of_weights(rewrite: Any) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 6, 8))

        def forward(self, x: Tensor) -> Any:
            return ops.bmm(x, self.w)

    got = rewrite(Heads(), torch.randn(5, 3, 8))
    assert got.of(PASS) == [(False, "w is not a matrix")]


def test_not_an_ambiguous_scale(rewrite: Any) -> None:
    def call(x: Tensor, w: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return ops.gemm(x, w, s, None, False)

    got = rewrite(Gemm(call, scale=(6, 6)), torch.randn(5, 6))
    assert got.of(PASS) == [(False, "scale of shape [6, 6] has no single axis of 6 for N")]
