"""On a CUDA device: the ATen kernels against float64, and the backend under Inductor and CUDA
graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_ext
from compile_ext.demo.kernels import count_kernels
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import (
    block_scaled_mm,
    deep_gemm_support,
    dequantize_fp8_blocks,
    dequantize_fp8_groups,
    fp8_bmm,
    grouped_block_scaled_mm,
    grouped_block_scaled_mm_masked,
    quantize_fp8_blocks,
    quantize_fp8_groups,
    quantize_fp8_per_token,
    router_gemm,
    router_gemm_m1,
    scaled_mm,
)
from compile_ext.ops.define import definition_of

pytestmark = pytest.mark.gpu
# Of an element and of the mean magnitude. One rounding to bfloat16 is 2^-9 of an element; where
# products cancel, the tensor cores' accumulation shows. Seen on an H200 for K up to 7168: 0.0031 of
# the largest element, so this leaves a factor of about two.
BFLOAT16 = 2.0**-8


def close(got: Tensor, exact: Tensor, relative: float) -> None:
    error = (got.double() - exact.double()).abs()
    bound = relative * exact.double().abs() + relative * exact.double().abs().mean()
    assert bool((error <= bound).all()), float((error / bound).max())


def kernel(op: Any, *args: Any) -> str:
    definition = definition_of(op)
    assert definition is not None
    return definition.kernel_for(*args)[0].name


OPS = torch.ops.compile_ext


@pytest.mark.parametrize("m", [0, 1, 5, 64])
@pytest.mark.parametrize("n", [64, 50], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("scales", ["per token", "per tensor", "mixed"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_scaled_mm(m: int, n: int, scales: str, with_bias: bool) -> None:
    a, scale_a = quantize_fp8_per_token(torch.randn(m, 128, device="cuda"))
    b, scale_b = quantize_fp8_per_token(torch.randn(n, 128, device="cuda"))
    if scales != "per token":
        scale_a = torch.full((1,), 0.3, device="cuda")
    if scales == "per tensor":
        scale_b = torch.full((), 0.7, device="cuda")
    bias = torch.randn(n, device="cuda").bfloat16() if with_bias else None
    exact = (a.double() @ b.double().t()) * scale_a.double().reshape(-1, 1)
    exact = exact * scale_b.double().reshape(1, -1)
    got = scaled_mm(a, b, scale_a, scale_b, bias)
    assert got.shape == (m, n)
    assert got.is_contiguous()
    if m:
        close(got, exact if bias is None else exact + bias.double(), BFLOAT16)
    wanted = "aten" if m and n % 16 == 0 else "triton"
    assert kernel(OPS.scaled_mm.default, a, b, scale_a, scale_b, bias, torch.bfloat16) == wanted


@pytest.mark.parametrize("m", [0, 1, 5, 64])
@pytest.mark.parametrize(
    ("n", "k"),
    # K of 4, 1, 56, 4, 5 (partial), 5, 11 and 2 blocks: rows of scale_b come in multiples of 4.
    [
        *((256, 512), (128, 128), (1536, 7168), (192, 512), (256, 576), (384, 640), (256, 1408)),
        (130, 200),
    ],
    ids=str,
)
def test_block_scaled_mm(m: int, n: int, k: int) -> None:
    x = torch.randn(m, k).bfloat16()
    b, scale_b = quantize_fp8_blocks(torch.randn(n, k, device="cuda"))
    a, scale_a = (y.cuda() for y in quantize_fp8_groups(x))  # on the CPU, as the kernels do
    x = x.cuda()
    dequantized = dequantize_fp8_groups(a, scale_a), dequantize_fp8_blocks(b, scale_b)
    exact = dequantized[0].double() @ dequantized[1].double().t()
    quantizes, got = block_scaled_mm(x, b, None, scale_b), block_scaled_mm(a, b, scale_a, scale_b)
    assert quantizes.shape == got.shape == (m, n)
    assert quantizes.is_contiguous()
    assert got.is_contiguous()
    if m:
        close(got, exact, BFLOAT16)
        # Where ATen runs, PyTorch quantizes, on CUDA: it multiplies by 1 / 448, and of the values
        # half-way between two e4m3 numbers, about one in a hundred, some go the other way.
        assert (quantizes.double() - exact).norm() <= 1e-2 * exact.norm()
    wanted = "triton"
    if m and n % 16 == 0 and k % 16 == 0:
        wanted = "aten"
    if m and n % 64 == 0 and k % 128 == 0 and deep_gemm_support.why_not() is None:
        wanted = "deep_gemm"
    if m <= (64 if n <= 1024 else 16) and k % 16 == 0:
        wanted = "triton_small_m"
    arguments = (a, b, scale_a, scale_b, None, torch.bfloat16)
    assert kernel(OPS.block_scaled_mm.default, *arguments) == wanted


@pytest.mark.parametrize("shape", [(0, 256), (1, 256), (5, 256), (2, 3, 256), (256,)], ids=str)
@pytest.mark.parametrize("a_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("b_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_router_gemm(shape: tuple[int, ...], a_dtype: torch.dtype, b_dtype: torch.dtype) -> None:
    a = torch.randn(shape, device="cuda").to(a_dtype)
    b = torch.randn(16, 256, device="cuda").to(b_dtype)
    bias = torch.randn(16, device="cuda")
    exact = a.double() @ b.double().t() + bias.double()
    got = router_gemm(a, b, bias)
    assert got.dtype == torch.float32
    # 256 products, exact in float32 or rounded by 2^-24, are summed; each sum rounds by 2^-24.
    close(got, exact, 256 * 2.0**-24)
    if a.numel():
        assert kernel(OPS.router_gemm.default, a, b, bias) != "reference"
    if a.numel() == 256:
        assert torch.equal(router_gemm_m1(a, b, bias), got)


def test_router_gemm_is_exact_where_torch_allows_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    a = torch.eye(17, 256, device="cuda") * (1 + 2.0**-20)  # 1 in TF32
    b = torch.ones(16, 256, device="cuda")
    assert torch.equal(router_gemm(a, b), (1 + 2.0**-20) * b.new_ones(17, 16))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = BlockFp8Linear(torch.randn(256, 128) / 11)
        self.down = ChannelFp8Linear(torch.randn(50, 256) / 16, torch.randn(50).bfloat16())
        self.gate = nn.Linear(128, 8, bias=False).bfloat16()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(self.up(x)), self.gate(x).float().softmax(-1)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_backend_follows_weight_updates(mode: str) -> None:
    model = Block().cuda()
    compiled = torch.compile(model, backend="compile_ext", mode=mode)
    bias = model.down.bias
    assert bias is not None
    with torch.no_grad():
        for m in (5, 1, 7):
            x = torch.randn(m, 128, device="cuda").bfloat16()
            for update in range(3):
                got = []
                for _ in range(3):  # CUDA graphs: warm up, record, replay
                    got = [t.clone() for t in compiled(x)]
                # FP8 steps of 2^-4 in a few of 256 inputs: Inductor keeps float32 where eager
                # rounds.
                for g, w in zip(got, model(x), strict=True):
                    torch.testing.assert_close(g, w, rtol=2.0**-4, atol=0.15)
                weight = model.down.weight.view(torch.uint8)
                weight.copy_(weight.flip(0))
                model.down.weight_scale.mul_(1.5)
                bias.add_(update)
    report = compile_ext.explain(model)
    kernels = {r.module: r.site.kernel for r in report.rows if r.site}
    assert kernels["down"] == "aten"
    assert kernels["up"] not in ("reference", "triton")  # which of the others, M says
    assert kernels["gate"] != "reference"


def test_strip_removes_a_kernel() -> None:
    class Placeholder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = BlockFp8Linear(torch.randn(256, 128))

        def forward(self, x: Tensor) -> Tensor:
            return block_scaled_mm(x, self.up.weight, x.new_ones(1), self.up.weight_scale)

    model, x = Placeholder().cuda(), torch.randn(5, 128, device="cuda").bfloat16()
    counts = {}
    with torch.no_grad():
        for disable in ([], ["strip_placeholder_fills"]):
            torch._dynamo.reset()
            # A quantized activation has a scale of its own, and no placeholder.
            left_out = ["quantize_activations", *disable]
            options: dict[str, Any] = {"compile_ext.disable": left_out}
            compiled = torch.compile(model, backend="compile_ext", options=options)
            compiled(x)
            counts[bool(disable)] = count_kernels(lambda: compiled(x))  # noqa: B023
    assert counts[True] == counts[False] + 1


def test_wrong_device_is_refused() -> None:
    a, scale = quantize_fp8_per_token(torch.randn(2, 16))
    with pytest.raises(compile_ext.CompileExtError, match="b on cuda:0 and a on cpu"):
        scaled_mm(a, a.cuda(), scale, scale)


GROUPED = {
    # One group a block of 128 rows, as the op wants it, and rows without one.
    "contiguous": (
        grouped_block_scaled_mm,
        (260,),
        ([2] * 100 + [-1] * 28 + [0] * 120 + [3] * 8 + [1] * 3 + [2**31 - 1],),
    ),
    "masked": (grouped_block_scaled_mm_masked, (3, 6), ([0, 4, 99], 5)),
    "heads": (fp8_bmm, (6, 3), ()),
}


@pytest.mark.parametrize(("op", "rows", "rest"), GROUPED.values(), ids=GROUPED)
def test_grouped_gemms_equal_the_cpu_and_wait_for_nothing(op: Any, rows: Any, rest: Any) -> None:
    fp8 = torch.float8_e4m3fn
    a, b = torch.randn(*rows, 200).to(fp8), torch.randn(3, 130, 200).to(fp8)
    counts = [torch.tensor(x).int() if isinstance(x, list) else x for x in rest]
    args = (a, b, torch.rand(*rows, 2), torch.rand(3, 2, 2), *counts, torch.float32)
    moved = [x.cuda() if isinstance(x, Tensor) else x for x in args]
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = op(*moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.is_contiguous()
    want = op(*args)
    if op is grouped_block_scaled_mm_masked:  # of other rows it says nothing
        used = torch.arange(rows[1]) < counts[0][:, None]
        got, want = got[used.cuda()], want[used]
        assert len(want) == 4 + 6
    close(got.cpu(), want, BFLOAT16)
