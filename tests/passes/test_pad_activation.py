"""fold_weight_padding pads K of an activation where it is quantized."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from compile_ext.layers import BlockFp8Linear
from compile_ext.ops import block_scaled_mm, quantize_fp8_groups, quantize_fp8_per_token

PASS = "fold_weight_padding"
FIRED = (True, "K 6 -> 8: w, x padded")
K = 6
ops = torch.ops.compile_ext_tests
FP8 = torch.float8_e4m3fn


class Layer(nn.Module):
    """Two FP8 weights [5, k], of which K = 6 breaks the alignment of 4, and a norm's weight."""

    def __init__(self, run: Callable[..., Any], k: int = K) -> None:
        super().__init__()
        self.run = run
        self.w, self.v = (
            nn.Parameter(torch.randn(5, k).to(FP8), requires_grad=False) for _ in range(2)
        )
        self.norm = nn.Parameter(torch.rand(k) + 0.5)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def quantized_gemm(m: Layer, x: Tensor) -> Tensor:
    return ops.gemm_fp8(*with_weight(m.w, *quantize_fp8_per_token(x)))


def with_weight(w: Tensor, q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, w, scale


def rms_norm(m: Layer, x: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * m.norm


def add_then_norm(m: Layer, x: Tensor) -> Any:
    residual = x + x.flip(0)
    return quantized_gemm(m, rms_norm(m, residual)), residual * 3


def by(amax: Callable[[Tensor], Tensor]) -> Callable[[Layer, Tensor], Tensor]:
    """A quantization by hand, with its reduction spelled by ``amax``."""

    def run(m: Layer, x: Tensor) -> Tensor:
        scale = amax(x).clamp(min=1e-10) / 448
        return ops.gemm_fp8((x / scale).clamp(-448, 448).to(FP8), m.w, scale)

    return run


# Reductions whose pad is masked: eager's numbers, bit for bit (GEMM_FP8 is exact).
EXACT: dict[str, Callable[[Any, Tensor], Any]] = {
    "nothing": quantized_gemm,
    "gelu": lambda m, x: quantized_gemm(m, F.gelu(x)),
    "silu * mul": lambda m, x: quantized_gemm(m, F.silu(x) * x.roll(1, 0)),
    "exp, 1 where x is 0": lambda m, x: quantized_gemm(m, (x - 9).exp()),
    "bias of a parameter": lambda m, x: quantized_gemm(m, x * 1e-3 + m.norm),
    "where": lambda m, x: quantized_gemm(m, torch.where(x > 0, x, -0.5)),
    "bfloat16": lambda m, x: quantized_gemm(m, x.bfloat16()),
    "amax": by(lambda x: x.abs().amax(-1, keepdim=True)),
    "amax, last axis by its number": by(lambda x: x.abs().amax(1, True)),
    "torch.amax": by(lambda x: torch.amax(x.abs(), dim=-1, keepdim=True)),
    "aten.amax": by(lambda x: torch.ops.aten.amax.default(x.abs(), [-1], True)),
    "negative amax": by(lambda x: (-x.abs() - 1).amax(-1, keepdim=True).neg()),
}


@pytest.mark.parametrize("run", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("m", [5, 1])
def test_exact(rewrite: Any, run: Any, m: int) -> None:
    got = rewrite(Layer(run), torch.randn(m, K))
    assert got.of(PASS) == [FIRED]
    assert "value=-inf" in got.graph  # the reduction reads the padded extents


def test_graph(rewrite: Any) -> None:
    assert_expected_inline(
        rewrite(Layer(quantized_gemm), torch.randn(5, K)).graph,
        """\
arg1: float32[5, 6]
arg2: float8_e4m3fn[5, 8] = pad([0, 2], 0)
%0: float32[5, 8] = pad(arg1, [0, 2], value=0.0)
%1: float32[5, 8] = .float(%0)
%2: float32[5, 8] = .abs(%1)
%3: float32[5, 6] = .narrow(%2, -1, 0, 6)
%4: float32[5, 8] = pad(%3, [0, 2], value=-inf)
%5: float32[5, 1] = .amax(%4, dim=-1, keepdim=True)
%6: float32[5, 1] = .clamp(%5, min=1e-10)
%7: float32[5, 1] = truediv(%6, 448.0)
%8: float32[5, 8] = truediv(%1, %7)
%9: float32[5, 8] = .clamp(%8, -448.0, 448.0)
%10: float32[5, 6] = .narrow(%9, -1, 0, 6)
%11: float32[5, 8] = pad(%10, [0, 2], value=0)
%12: float8_e4m3fn[5, 8] = .to(%11, float8_e4m3fn)
%13: float8_e4m3fn[5, 8] = .contiguous(%12)
%14: float32[5, 5] = compile_ext_tests::gemm_fp8(%13, arg2, %7)
return [%14]""",
    )


# Means and sums add 6 numbers in another order: a scale is some 2^-23 off, and with it a result, of
# 6 products up to 20: less than 1e-4. No number here lies so close to the edge of two FP8 values
# that it takes the other one, which would be 2^-3 of a product.
SUMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "RMSNorm": lambda m, x: quantized_gemm(m, rms_norm(m, x)),
    "add, norm, residual": add_then_norm,
    "sum": by(lambda x: x.abs().sum(-1, keepdim=True)),
    "mean": by(lambda x: x.abs().mean(-1, keepdim=True) * 6),
    "sum of exp": by(lambda x: x.exp().sum(-1, keepdim=True)),
}


# The sum reads the padded extents, in which the pad holds zeros.
MASKED_SUM = re.compile(
    r"(%\d+): float32\[5, 6\] = \.narrow\(%\d+, -1, 0, 6\)\n"
    r"(%\d+): float32\[5, 8\] = pad\(\1, \[0, 2\], value=0\.0\)\n"
    r"%\d+: float32\[5, 1\] = \.?sum\(\2, -1, (keepdim=)?True\)\n"
)


@pytest.mark.parametrize("run", SUMS.values(), ids=SUMS)
def test_sums(rewrite: Any, run: Any) -> None:
    got = rewrite(Layer(run), torch.randn(5, K), tolerance=1e-4)
    assert got.of(PASS) == [FIRED]
    assert MASKED_SUM.search(got.graph)


BEHIND: dict[str, Callable[[Any, Tensor], Any]] = {  # the pad stays behind the quantization
    "static scale": by(lambda x: x.new_full((1, 1), 0.5)),
    "max with indices": by(lambda x: x.abs().max(-1, keepdim=True).values),
    "norm": by(lambda x: x.norm(dim=-1, keepdim=True)),
    "without keepdim": by(lambda x: x.abs().amax(-1).unsqueeze(-1)),
}


@pytest.mark.parametrize("run", BEHIND.values(), ids=BEHIND)
def test_padded_behind(rewrite: Any, run: Any) -> None:
    got = rewrite(Layer(run), torch.randn(5, K))
    assert got.of(PASS) == [FIRED]
    assert "inf" not in got.graph


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e-30])
def test_rows_of_odd_values(rewrite: Any, value: float, inner: str) -> None:
    x = torch.randn(4, K)
    x[1, 2], x[3] = value, value
    # Inductor's x / s may round otherwise.
    tolerance = 0.0 if inner == "eager" else 1e-3
    options = {"compile_ext.inner": inner}
    got = rewrite(Layer(quantized_gemm), x, tolerance=tolerance, options=options)
    assert got.of(PASS) == [FIRED]


def test_scale_of_zero(rewrite: Any) -> None:
    def run(m: Layer, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True)
        return ops.gemm_fp8((x / scale).to(FP8), m.w, scale)  # 0 / 0 is NaN, in the pad as well

    x = torch.randn(3, K)
    x[1] = 0
    assert rewrite(Layer(run), x).of(PASS) == [FIRED]


def test_dynamic_m(rewrite: Any) -> None:
    model, x = Layer(quantized_gemm), torch.randn(5, K)
    torch._dynamo.mark_dynamic(x, 0)
    got = rewrite(model, x)
    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    with torch.no_grad():
        for m in (3, 64):
            x = torch.randn(m, K)
            assert torch.equal(compiled(x), model(x))
    assert len(got.modules) == 1


def test_no_tokens(rewrite: Any) -> None:
    assert rewrite(Layer(quantized_gemm), torch.randn(0, K)).of(PASS) == [FIRED]


def test_three_dimensions(rewrite: Any) -> None:
    run = by(lambda x: x.abs().amax(-1, keepdim=True))
    got = rewrite(Layer(lambda m, x: run(m, F.silu(x) * m.norm)), torch.randn(2, 3, K))
    assert got.of(PASS) == [FIRED]
    assert "value=-inf" in got.graph


def test_one_feature(rewrite: Any) -> None:
    got = rewrite(Layer(quantized_gemm, k=1), torch.randn(5, 1))
    assert got.of(PASS) == [(True, "K 1 -> 4: w, x padded")]


@pytest.mark.parametrize("what", ["x", "q", "scale"])
def test_written_in_between(rewrite: Any, what: str) -> None:
    def run(m: Layer, x: Tensor) -> Any:
        x = x * 2
        scale = x.abs().amax(-1, keepdim=True) / 448
        if what == "x":
            x.mul_(0.5)
        q = x / scale
        if what == "q":
            q[0].zero_()
        if what == "scale":
            scale.add_(1)
        return ops.gemm_fp8(q.to(FP8), m.w, scale), x, q, scale

    got = rewrite(Layer(run), torch.randn(5, K))
    assert got.of(PASS) == [FIRED]


def test_two_gemms_of_one_activation_and_its_other_readers(rewrite: Any) -> None:
    def run(m: Layer, x: Tensor) -> Any:
        q, scale = quantize_fp8_per_token(F.silu(x))
        first, second = (ops.gemm_fp8(q, w, scale) for w in (m.w, m.v))
        unaligned = ops.gemm_fp8(q[:, :4], m.w[:, :4], scale)  # K = 4 needs no pad
        return first, second, unaligned, q.float(), scale

    got = rewrite(Layer(run), torch.randn(5, K))
    assert got.of(PASS) == [FIRED, FIRED, (False, "N=5, K=4 need no padding")]


def test_weight_of_the_norm_is_padded_once(rewrite: Any) -> None:
    got = rewrite(Layer(SUMS["RMSNorm"]), torch.randn(5, K), tolerance=1e-4)
    assert "float32[8] = pad([0, 2], 0)" in got.graph


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_groups(rewrite: Any, inner: str) -> None:
    layer = BlockFp8Linear(torch.randn(50, 136))

    def run(x: Tensor) -> Tensor:
        q, scale = quantize_fp8_groups(F.silu(x))
        return block_scaled_mm(q, layer.weight, scale, layer.weight_scale)

    # One ulp of a bfloat16 result below 64 is 0.25; float32 sums of another order round it.
    # Inductor does not round silu to bfloat16: some of 136 inputs take the FP8 value beside.
    got = rewrite(
        run,
        torch.randn(5, 136).bfloat16(),
        tolerance=0.25 if inner == "eager" else 1.0,
        options={"compile_ext.inner": inner},
    )
    assert [fired for fired, _ in got.of(PASS)] == [True]


@pytest.mark.parametrize("run", [EXACT["silu * mul"], SUMS["add, norm, residual"]])
def test_inductor(rewrite: Any, run: Any) -> None:
    # Inductor's silu, rsqrt and divisions round otherwise: FP8 neighbours, 2^-3 of one product.
    got = rewrite(
        Layer(run), torch.randn(5, K), tolerance=0.5, options={"compile_ext.inner": "inductor"}
    )
    assert got.of(PASS) == [FIRED]


def test_amax_of_all_tokens(rewrite: Any) -> None:
    run = by(lambda x: x.abs().amax((0, 1), keepdim=True))
    assert rewrite(Layer(run), torch.randn(5, K)).of(PASS) == [FIRED]


def test_mean_of_all_tokens(rewrite: Any) -> None:
    def run(m: Layer, x: Tensor) -> Any:
        scale = x.abs().mean((0, 1), keepdim=True)
        return ops.gemm_fp8((x / scale).to(FP8), m.w, scale), scale

    rewrite(Layer(run), torch.randn(5, K))


def test_mean_in_float64(rewrite: Any) -> None:
    def run(m: Layer, x: Tensor) -> Any:
        scale = x.abs().mean(-1, keepdim=True, dtype=torch.float64)
        return ops.gemm_fp8((x / scale).to(FP8), m.w, scale), scale

    rewrite(Layer(run), torch.randn(5, K))
