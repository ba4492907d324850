"""The contracts of our ops are true: proved by running the ops, on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile_ext.ops import quantize_fp8_blocks, quantize_fp8_groups, quantize_fp8_per_token
from compile_ext.testing import ContractReport, check_contract

OPS = torch.ops.compile_ext
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [  # m, n, k, with a bias
    (1, 16, 128, False),
    (5, 50, 130, True),
    (3, 130, 257, False),
    (4, 64, 384, False),
    (7, 1, 9, True),
    (2, 48, 640, True),
]
ALIGN = ("align['n']", "align['k']", "align['n', 'k']")


def router_gemm(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    return a, b, torch.randn(n) if bias else None


def router_gemm_float32(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    a, b, rest = router_gemm(m, n, k, bias)
    return a, b.float(), rest


def router_gemm_one(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    return router_gemm(1, n, k, bias)


def scaled_mm(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    a, scale_a = quantize_fp8_per_token(torch.randn(m, k))
    b, scale_b = quantize_fp8_per_token(torch.randn(n, k))
    return a, b, scale_a, scale_b, torch.randn(n).bfloat16() if bias else None, torch.bfloat16


def scaled_mm_per_tensor(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    a, b, _, _, *rest = scaled_mm(m, n, k, bias)
    return a, b, torch.tensor([0.3]), torch.tensor(0.7), *rest


def block_scaled_mm(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    a, scale_a = quantize_fp8_groups(torch.randn(m, k).bfloat16())
    b, scale_b = quantize_fp8_blocks(torch.randn(n, k))
    return a, b, scale_a, scale_b, torch.randn(n) if bias else None, torch.float32


def block_scaled_mm_bfloat16(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    _, b, scale_a, scale_b, *rest = block_scaled_mm(m, n, k, bias)
    return torch.randn(m, k).bfloat16(), b, scale_a, scale_b, *rest


def block_scaled_mm_one(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    return block_scaled_mm(1, n, k, bias)


def block_scaled_mm_that_prefetches(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    return *block_scaled_mm(m, n, k, bias), True


def rms_norm(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    x, weight = torch.randn(m, k).bfloat16(), torch.randn(k).bfloat16() if bias else None
    return x, weight, 1e-6, bias


def rms_norm_that_prefetches(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    return *rms_norm(m, n, k, bias), True


def add_rms_norm(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    return torch.randn(m, k).bfloat16(), *rms_norm(m, n, k, bias)


def router_topk(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    groups = 4 if n % 4 == 0 else 1
    choice = torch.randn(n) if bias else None, min(n, 8), "sigmoid", groups, min(groups, 2)
    return torch.randn(m, n), *choice, 0.0, True, 2.5


def rms_norm_router(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    x, weight, *norm = rms_norm(1, n, k, bias)
    residual = torch.randn(1, k).bfloat16() if n % 2 else None
    return x, residual, weight, *norm, *router_gemm(1, n, k, bias)[1:]


def rms_norm_router_topk(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    return *rms_norm_router(m, n, k, bias), *router_topk(m, n, k, bias)[1:]


def attn_residual(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    x, *norm = rms_norm(m, n, k, bias)
    return x, torch.randn(m, 3, k).bfloat16(), torch.randn(k), 1e-6, *norm, True


def column_major(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    return (torch.rand(m, n),)


def expert_weights(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    b, scale_b = zip(*(quantize_fp8_blocks(torch.randn(n, k)) for _ in range(3)), strict=True)
    return torch.stack(b), torch.stack(scale_b)


def grouped_block_scaled_mm(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    a, scale_a = quantize_fp8_groups(torch.randn(m, k).bfloat16())
    b, scale_b = expert_weights(n, k)
    m_indices = torch.tensor([2, -1, 3, 0, 1, 2**31 - 1, -(2**31)])[:m].int()
    return a, b, scale_a, scale_b, m_indices, torch.float32


def grouped_block_scaled_mm_masked(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    a, scale_a = quantize_fp8_groups(torch.randn(3 * m, k).bfloat16())
    b, scale_b = expert_weights(n, k)
    a, scale_a, masked_m = a.view(3, m, k), scale_a.unflatten(0, (3, m)), torch.tensor([m, m, 999])
    return a, b, scale_a, scale_b, masked_m.int(), 2, torch.float32


def fp8_bmm(m: int, n: int, k: int, bias: bool) -> tuple[Any, ...]:
    a, b, scale_a, scale_b, *_, dtype = grouped_block_scaled_mm_masked(m, n, k, bias)
    return a.transpose(0, 1), b, scale_a.transpose(0, 1), scale_b, dtype


def run(make: Callable[..., Any], op: str, shape: Any, device: str) -> ContractReport:
    inputs = make(*shape)
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]
    return check_contract(getattr(OPS, op).default, moved)


def others(report: ContractReport, device: str) -> set[str]:
    """What these inputs leave open, apart from what needs a GPU."""
    left = {name.split()[0] for name in report.not_exercised} - {"gemm"}
    return left - ({"prewait_reads"} if device == "cpu" else set())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("make", "op", "claims"),
    [
        (scaled_mm, "scaled_mm", ALIGN),
        (scaled_mm_per_tensor, "scaled_mm", ALIGN),
        (block_scaled_mm, "block_scaled_mm", (*ALIGN, "memory['scale_b']")),
        (
            block_scaled_mm_bfloat16,
            "block_scaled_mm",
            ("unread['scale_a']", *ALIGN, "memory['scale_b']"),
        ),
        (block_scaled_mm_one, "block_scaled_mm_m1", (*ALIGN, "memory['scale_b']")),
        (block_scaled_mm_that_prefetches, "block_scaled_mm", (*ALIGN, "memory['scale_b']")),
        (grouped_block_scaled_mm, "grouped_block_scaled_mm", ()),
        (grouped_block_scaled_mm_masked, "grouped_block_scaled_mm_masked", ()),
        (fp8_bmm, "fp8_bmm", ()),
        (router_gemm, "router_gemm", ("m1_variant compile_ext.router_gemm_m1.default",)),
        (router_gemm_float32, "router_gemm", ("m1_variant compile_ext.router_gemm_m1.default",)),
        (router_gemm_one, "router_gemm_m1", ()),
        (rms_norm, "rms_norm", ()),
        (rms_norm_that_prefetches, "rms_norm", ()),
        (add_rms_norm, "add_rms_norm", ()),
        (rms_norm, "rms_norm_quantize_fp8", ()),
        (add_rms_norm, "add_rms_norm_quantize_fp8", ()),
        (router_topk, "router_topk", ()),
        (rms_norm_router, "rms_norm_router", ()),
        (rms_norm_router_topk, "rms_norm_router_topk", ()),
        (attn_residual, "attn_residual", ()),
        (column_major, "column_major", ()),
    ],
    ids=lambda x: x.__name__ if callable(x) else x if isinstance(x, str) else "",
)
def test_contract_holds(make, op, claims, shape, device):
    report = run(make, op, shape, device)
    print(report)
    assert {"clean runs", "bounds (every op)", *claims} <= set(report.holds), str(report)
    assert others(report, device) <= {"unread['scale_a']"}, str(report)


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_prove_nothing_and_break_nothing(device):
    for make, op in ((scaled_mm, "scaled_mm"), (block_scaled_mm_bfloat16, "block_scaled_mm")):
        report = run(make, op, (0, 16, 128, False), device)
        assert report.holds == ()
        assert "no elements" in report.not_exercised["align['n']"]
