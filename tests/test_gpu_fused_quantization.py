"""On a CUDA device: a block of a block-scaled FP8 model runs four kernels, and no quantization of
its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import compile_ext
from compile_ext.layers import BlockFp8Linear
from compile_ext.ops.quantize import quantize_fp8_blocks, quantize_fp8_groups

pytestmark = pytest.mark.gpu
K, FFN = 1024, 2048


class Block(nn.Module):
    """``norm -> gate_up -> silu * mul -> down``, with the residual's sum where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(K).bfloat16() + 0.5, requires_grad=False)
        self.gate_up = BlockFp8Linear(torch.randn(2 * FFN, K) / K**0.5)
        self.down = BlockFp8Linear(torch.randn(K, FFN) / FFN**0.5)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        gate, up = self.gate_up(F.rms_norm(x, (K,), self.weight, 1e-6)).chunk(2, -1)
        return self.down(F.silu(gate) * up), x


def kernels_of(compiled: object, *args: Tensor) -> list[str]:
    """The kernels of one call, in order; copies and fills are some."""
    assert callable(compiled)
    # acc_events: else some versions of torch warn that events of earlier cycles are dropped.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        compiled(*args)
        torch.cuda.synchronize()
    events = [e for e in profiled.events() or [] if e.device_type.name == "CUDA"]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


@pytest.mark.parametrize("m", [1, 8, 256])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
def test_a_block_runs_four_kernels(m: int, with_residual: bool) -> None:
    model = Block().cuda()
    args = [torch.randn(m, K, device="cuda").bfloat16() for _ in range(1 + with_residual)]
    compiled = torch.compile(model, backend="compile_ext", dynamic=False)
    with torch.no_grad():
        compiled(*args)
        got = compiled(*args)
        names = kernels_of(compiled, *args)
        want = model(*args)
    report = compile_ext.explain(compiled)
    assert len(names) == 4, "\n".join([*names, str(report)])
    # norm, gate_up, silu * mul and quantization, down: the third is Inductor's, whose names for
    # kernels list the ATen ops inside.
    assert ["triton_" in x for x in names] == [False, False, True, False], names
    assert "silu" in names[2], names
    assert "amax" in names[2], names
    norm = "add_rms_norm_quantize_fp8" if with_residual else "rms_norm_quantize_fp8"
    assert f"compile_ext::{norm}" in [row.op for row in report.rows], str(report)
    # silu * mul is not rounded to bfloat16 in Inductor's kernel, and the norm's sum has another
    # order: of 64 elements about one gets the next FP8 number, 2^-3 of it away. So 1/64 of the
    # 2048 products are off by 2^-3: sqrt(1/64) * 2^-3 = 2^-6 of the norm of all of them, in the
    # inputs of both GEMMs. 2^-4 leaves a factor of 4.
    error = (got[0].float() - want[0].float()).norm() / want[0].float().norm()
    assert float(error) < 2.0**-4
    assert torch.equal(got[1], want[1])


def test_dynamic_m_runs_four_kernels_and_compiles_once() -> None:
    model = Block().cuda()
    compiled = torch.compile(model, backend="compile_ext")
    with torch.no_grad():
        for m in (8, 5, 256, 1023):
            args = [torch.randn(m, K, device="cuda").bfloat16() for _ in range(2)]
            for x in args:
                torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)
            compiled(*args)
            names = kernels_of(compiled, *args)
            assert len(names) == 4, "\n".join([str(m), *names])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_linears_of_one_input_share_its_quantization() -> None:
    linears = nn.ModuleList(BlockFp8Linear(torch.randn(256, K) / K**0.5) for _ in range(3)).cuda()

    def project(x: Tensor) -> list[Tensor]:
        return [linear(x) for linear in linears]

    compiled = torch.compile(project, backend="compile_ext", dynamic=False)
    with torch.no_grad():
        for m in (8, 256):
            x = torch.randn(m, K, device="cuda").bfloat16()
            for _ in range(2):
                compiled(x)
            names = kernels_of(compiled, x)
            assert len(names) == 4, "\n".join([str(m), *names])


def test_scales_that_are_powers_of_two_take_no_kernel_of_their_own() -> None:
    layer = BlockFp8Linear(torch.randn(2 * FFN, K) / K**0.5, use_ue8m0=True).cuda()
    compiled = torch.compile(layer, backend="compile_ext")
    with torch.no_grad():
        for m in (8, 5, 256, 1023):
            x = torch.randn(m, K, device="cuda").bfloat16()
            torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)
            got = compiled(x)
            names = kernels_of(compiled, x)
            assert ["amax" in x for x in names] == [True, False], "\n".join([str(m), *names])
            # Divided by a power of two, and rounded once: the same bits in any kernel.
            assert torch.equal(got, layer(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_cublaslt_reads_scales_in_columns_where_they_lie() -> None:
    b, scale_b = quantize_fp8_blocks(torch.randn(256, K, device="cuda"))

    def product(a: Tensor, scale_a: Tensor) -> Tensor:
        return torch.ops.compile_ext.block_scaled_mm(
            a, b, scale_a, scale_b, None, torch.bfloat16, pinned="aten"
        )

    for m, in_place, copied in ((64, 1, 2), (63, 4, 4)):  # 63: a is padded too, in two kernels
        a, scale_a = quantize_fp8_groups(torch.randn(m, K, device="cuda"))
        # Beside numbers that a kernel must not read, and at an address that it cannot.
        beside = torch.full((m * K // 128 + 1,), torch.nan, device="cuda")
        odd = beside[1:].as_strided((m, K // 128), (1, m)).copy_(scale_a)
        assert len(kernels_of(product, a, scale_a)) == in_place
        want = product(a, scale_a.contiguous())
        for scale in (scale_a.contiguous(), odd):
            assert len(kernels_of(product, a, scale)) == copied
        for scale in (scale_a, odd):
            assert torch.equal(product(a, scale), want)
