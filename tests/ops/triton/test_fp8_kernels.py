"""The Triton kernels of the FP8 GEMMs against float64: in the interpreter, and on the GPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops.block_scaled_mm_small_m import Config
from compile_ext.ops.quantize import (
    dequantize_fp8_groups,
    quantize_fp8_blocks,
    quantize_fp8_groups,
    quantize_fp8_per_token,
)

FP8 = torch.float8_e4m3fn
BLOCK_KERNELS = ["block_scaled_mm_triton", "block_scaled_mm_small_m"]  # the second takes FP8 alone
# m, n, k: whole blocks; partial ones in n, in k, in both; more groups than are loaded ahead
SHAPES = [
    (1, 128, 256),
    (1, 40, 128),
    (3, 130, 127),
    (7, 144, 1040),
    (16, 5, 300),
    (2, 17, 8200),
]  # fmt: skip
LARGE = [(33, 130, 127), (200, 257, 130), (129, 128, 384)]


def run(kernel: str, *args: Any) -> Tensor:
    result: Tensor = import_module(f"compile_ext.ops.{kernel}").run(*args)
    return result


def expanded(scale: Tensor, *sizes: int) -> Tensor:
    """The scale of each element, in float64."""
    for dim, size in enumerate(sizes):
        if scale.shape[dim] != size:
            scale = scale.repeat_interleave(128, dim)[(slice(None),) * dim + (slice(size),)]
    return scale.double()


def product(a: Tensor, b: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``a @ b.T + bias`` in float64, and what it becomes with absolute values."""
    extra = torch.zeros(1, dtype=torch.float64, device=a.device) if bias is None else bias.double()
    return a @ b.t() + extra, a.abs() @ b.t().abs() + extra.abs()


def operands(m: int, n: int, k: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = (torch.randn(m, k) * 10).to(FP8).to(device)
    b = (torch.randn(n, k) * 10).to(FP8).to(device)
    groups, rows = -(-k // 128), -(-n // 128)
    scales = torch.rand(m, groups) + 0.5, torch.rand(rows, groups) / 8 + 0.01
    return a, b, scales[0].to(device), scales[1].to(device)


# On the GPU, the tensor cores keep 14 bits of what they add inside one instruction on e4m3
# (DeepSeek-V3 technical report, section 3.3.2). Products cut off like that, in float64: up to
# 2^-12.5 of the magnitudes over 128 k, 2^-12.0 over 256. The interpreter sums in float32.
ROUNDING = {"cpu": 2.0**-24, "cuda": 2.0**-11}


def assert_close(got: Tensor, exact: Tensor, magnitude: Tensor, k: int) -> None:
    assert got.is_contiguous()
    assert got.shape == exact.shape
    assert torch.equal(got.isnan(), exact.isnan())
    sums = ROUNDING[got.device.type] * magnitude + (k + 4) * 2.0**-24 * magnitude
    info = torch.finfo(got.dtype)
    # The interpreter cuts float32 off to bfloat16: one ulp, where half is rounding.
    bound = sums + info.eps * (exact.abs() + sums) + info.tiny * info.eps
    excess = (got.double() - exact).abs() - bound
    assert not (excess > 0).any(), f"{excess.nan_to_num(0).max()} above the bound"


@pytest.mark.parametrize("kernel", BLOCK_KERNELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32], ids=str)
def test_block_scaled_mm(kernel: str, shape: Any, bias: Any, device: str) -> None:
    m, n, k = shape
    a, b, scale_a, scale_b = operands(m, n, k, device)
    added = None if bias is None else torch.randn(n, device=device).to(bias)
    got = run(kernel, a, b, scale_a, scale_b, added, torch.float32)
    x, w = a.double() * expanded(scale_a, m, k), b.double() * expanded(scale_b, n, k)
    assert_close(got, *product(x, w, added), k)


CONFIGS = [
    Config(columns, tokens, warps, ahead, later)
    for columns, tokens in ((16, 8), (32, 16), (16, 32))
    for warps, ahead, later in ((1, 2, 1), (2, 3, 1), (2, 2, 2), (4, 3, 2), (8, 7, 7))
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", [(5, 40, 1280), (33, 130, 1040), (8, 16, 2944)], ids=str)
@pytest.mark.parametrize("prefetch", [False, True])
def test_configurations_for_few_tokens(
    config: Config, shape: Any, prefetch: bool, device: str
) -> None:
    """Whole rounds and partial ones, partial steps, one round and several."""
    m, n, k = shape
    a, b, scale_a, scale_b = operands(m, n, k, device)
    run_small = import_module("compile_ext.ops.block_scaled_mm_small_m").run
    args = a, b, scale_a, scale_b, None, torch.float32
    got = run_small(*args, prefetch=prefetch, config=config)
    x, w = a.double() * expanded(scale_a, m, k), b.double() * expanded(scale_b, n, k)
    assert_close(got, *product(x, w, None), k)


@pytest.mark.parametrize("scale", ["a", "b", "both"])
def test_scales_that_are_powers_of_two_for_few_tokens(scale: str, device: str) -> None:
    a, b, scale_a, scale_b = operands(5, 40, 384, device)
    scale_a, scale_b = (torch.exp2(x.log2().round()) for x in (scale_a, scale_b))
    exact = [x.to(torch.float8_e8m0fnu) for x in (scale_a, scale_b)]
    given = exact[0] if scale != "b" else scale_a, exact[1] if scale != "a" else scale_b
    want = run("block_scaled_mm_small_m", a, b, scale_a, scale_b, None, torch.float32)
    assert torch.equal(run("block_scaled_mm_small_m", a, b, *given, None, torch.float32), want)


def test_each_configuration_that_ships_is_one(device: str) -> None:
    module = import_module("compile_ext.ops.block_scaled_mm_small_m")
    rows = module._measured()
    assert len(rows) == 8
    for (n, k), ranges in rows.items():
        assert [last for last, _ in ranges] == sorted({last for last, _ in ranges})
        for last, config in ranges:
            assert module.configure(last, n, k) == config
            assert 128 % config.columns == 0
            assert config.tokens in (8, 16, 32)
            assert config.warps in (1, 2, 4, 8)
            assert 1 <= config.later <= config.ahead


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_block_scaled_mm_of_many_tokens(shape: Any, device: str) -> None:
    m, n, k = shape
    a, b, scale_a, scale_b = operands(m, n, k, device)
    got = run("block_scaled_mm_triton", a, b, scale_a, scale_b, None, torch.float32)
    x, w = a.double() * expanded(scale_a, m, k), b.double() * expanded(scale_b, n, k)
    assert_close(got, *product(x, w, None), k)


@pytest.mark.parametrize("kernel", ["block_scaled_mm_triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantizes_as_the_reference_does(kernel: str, shape: Any, device: str) -> None:
    m, n, k = shape
    x = (torch.randn(m, k) * torch.logspace(-12, 12, m)[:, None]).bfloat16().to(device)
    x[:, : k // 4] = 0
    b, scale_b = quantize_fp8_blocks(torch.randn(n, k, device=device))
    got = run(kernel, x, b, None, scale_b, None, torch.float32)
    # The same e4m3 values and scales, or the result would differ by up to 2^-4 of a factor. On the
    # CPU: PyTorch on CUDA multiplies by 1 / 448, and the last bit of a scale can differ.
    a = dequantize_fp8_groups(*quantize_fp8_groups(x.cpu())).double().to(device)
    w = b.double() * expanded(scale_b, n, k)
    assert_close(got, *product(a, w, None), k)


@pytest.mark.parametrize("kernel", BLOCK_KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_output_dtypes(kernel: str, dtype: torch.dtype, device: str) -> None:
    a, b, scale_a, scale_b = operands(5, 40, 256, device)
    got = run(kernel, a, b, scale_a / 64, scale_b, None, dtype)
    assert got.dtype == dtype
    x, w = a.double() * expanded(scale_a / 64, 5, 256), b.double() * expanded(scale_b, 40, 256)
    assert_close(got, *product(x, w, None), 256)


@pytest.mark.parametrize(
    ("kernel", "quantizes"),
    [("block_scaled_mm_triton", True), *((kernel, False) for kernel in BLOCK_KERNELS)],
)
def test_every_value(kernel: str, quantizes: bool, device: str) -> None:
    """All 256 bytes as weights, NaN and subnormals among them, against one token."""
    b = torch.arange(256, dtype=torch.uint8).view(FP8)[:, None].repeat(1, 16).to(device)
    x = torch.ones(1, 16, device=device)
    a, scale_a = (x.bfloat16(), None) if quantizes else (x.to(FP8), x[:, :1])
    got = run(kernel, a, b, scale_a, torch.ones(2, 1, device=device), None, torch.float32)
    # Sums of 16 equal e4m3 values are exact; quantized, 1 is 448 of a scale of 1 / 448.
    torch.testing.assert_close(
        got, 16 * b[:, :1].float().t(), rtol=2.0**-22, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kernel", ["block_scaled_mm_triton"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(kernel: str, bad: float, device: str) -> None:
    x = torch.randn(4, 300, device=device).bfloat16()
    x[1, 140] = bad
    b, scale_b = quantize_fp8_blocks(torch.randn(24, 300, device=device))
    got = run(kernel, x, b, None, scale_b, None, torch.float32)
    assert got[1].isnan().all()
    assert got[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("kernel", [*BLOCK_KERNELS, "scaled_mm_triton"])
@pytest.mark.parametrize("shape", [(0, 8, 128), (3, 0, 128), (3, 8, 0)], ids=str)
def test_empty(kernel: str, shape: Any, device: str) -> None:
    m, n, k = shape
    a, b, scale_a, scale_b = operands(m, n, k, device)
    if kernel == "scaled_mm_triton":
        scale_a, scale_b = scale_a.new_ones(m, 1), scale_a.new_ones(n, 1)
    bias = torch.randn(n, device=device)
    got = run(kernel, a, b, scale_a, scale_b, bias, torch.float32)
    torch.testing.assert_close(got, bias.expand(m, n), rtol=0, atol=0)


@pytest.mark.parametrize("kernel", BLOCK_KERNELS)
def test_reads_no_element_that_is_not_its_own(kernel: str, device: str) -> None:
    """Rows with a stride, behind which NaN lies; scales column-major and row-major."""
    m, n, k = 3, 20, 200
    a, b, scale_a, scale_b = operands(m, n, k, device)
    around_a = torch.full((m + 2, 256), float("nan")).to(FP8).to(device)
    around_b = torch.full((n + 2, 256), float("nan")).to(FP8).to(device)
    around_scale = torch.full((4, 4), float("nan"), device=device)
    around_a[1:-1, :k], around_b[1:-1, :k], around_scale.t()[:m, :2] = a, b, scale_a
    want = run(kernel, a, b, scale_a, scale_b, None, torch.float32)
    strided = around_a[1:-1, :k], around_b[1:-1, :k], around_scale.t()[:m, :2]
    got = run(kernel, *strided, scale_b, None, torch.float32)
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [*SHAPES[:5], *LARGE], ids=str)
@pytest.mark.parametrize("scales", ["per token", "per tensor", "mixed"])
@pytest.mark.parametrize("bias", [None, torch.float16], ids=str)
def test_scaled_mm(shape: Any, scales: str, bias: Any, device: str) -> None:
    m, n, k = shape
    a, scale_a = quantize_fp8_per_token(torch.randn(m, k, device=device))
    b, scale_b = quantize_fp8_per_token(torch.randn(n, k, device=device))
    if scales != "per token":
        scale_a = torch.full((), 0.3, device=device)
    if scales == "per tensor":
        scale_b = torch.full((1, 1), 0.7, device=device)
    added = None if bias is None else torch.randn(n, device=device).to(bias)
    got = run("scaled_mm_triton", a, b, scale_a, scale_b, added, torch.float32)
    x, w = a.double() * scale_a.reshape(-1, 1), b.double() * scale_b.reshape(-1, 1)
    assert_close(got, *product(x, w, added), k)


@pytest.mark.parametrize("m", [1, 8, 16])
def test_a_row_does_not_depend_on_the_others(m: int, device: str) -> None:
    a, b, scale_a, scale_b = operands(16, 48, 640, device)
    whole = run("block_scaled_mm_triton", a, b, scale_a, scale_b, None, torch.float32)
    part = run("block_scaled_mm_triton", a[:m], b, scale_a[:m], scale_b, None, torch.float32)
    assert torch.equal(part, whole[:m])


@pytest.mark.parametrize("kernel", [*BLOCK_KERNELS, "scaled_mm_triton"])
@pytest.mark.parametrize("stride", [0, 2, 3])
def test_a_bias_with_a_stride(kernel: str, stride: int, device: str) -> None:
    a, b = torch.zeros(2, 128).to(FP8).to(device), torch.zeros(20, 128).to(FP8).to(device)
    one = torch.ones(1, 1, device=device)
    rows = one.expand(2, 1)
    bias = torch.arange(64.0, device=device).as_strided((20,), (stride,))
    got = run(kernel, a, b, rows, one, bias, torch.float32)
    assert torch.equal(got, bias.expand(2, 20))


@pytest.mark.parametrize("kernel", BLOCK_KERNELS)
def test_rows_that_lie_far_apart(kernel: str, device: str) -> None:
    """The last token of each of 16 long sequences: the offset does not fit in 32 bits."""
    a, b, scale_a, scale_b = operands(16, 16, 128, device)
    want = run(kernel, a, b, scale_a, scale_b, None, torch.float32)
    memory = torch.empty(15 * 2**28 + 128, dtype=FP8, device=device)  # of which 16 rows are touched
    far = memory.as_strided((16, 128), (2**28, 1)).copy_(a)
    assert torch.equal(run(kernel, far, b, scale_a, scale_b, None, torch.float32), want)
