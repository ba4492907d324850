"""The kernel ``batch_invariant``: a row's bits, and what is launched, do not depend on M."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import batch_invariant, triton_support
from compile_ext.ops.define import Kernel, definition_of
from compile_ext.ops.quantize import quantize_fp8_groups, quantize_fp8_per_token
from compile_ext.ops.rms_norm_quantize_fp8 import rms_norm_quantize_fp8

FP8 = torch.float8_e4m3fn
N, K = 40, 200  # partial tiles of n, partial groups of k
MANY = 200  # tokens: several tiles
TOKENS = (*range(1, 66), 130)


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(FP8)


def block_scaled(x: Tensor) -> tuple[Any, ...]:
    a, scale_a = quantize_fp8_groups(x)
    return a, fp8(N, K), scale_a, torch.rand(1, 2) + 0.5, torch.randn(N), torch.float32


def block_scaled_bfloat16(x: Tensor) -> tuple[Any, ...]:
    _, b, _, scale_b, *rest = block_scaled(x)
    return x, b, None, scale_b, *rest


def scaled(x: Tensor) -> tuple[Any, ...]:
    a, scale_a = quantize_fp8_per_token(x)
    return a, fp8(N, K), scale_a, torch.rand(N, 1), torch.randn(N), torch.float32


def router(x: Tensor) -> tuple[Any, ...]:
    return x, torch.randn(N, K).bfloat16(), torch.randn(N)


def router_float32(x: Tensor) -> tuple[Any, ...]:
    _, b, bias = router(x)
    return x, b.float(), bias


def contiguous(x: Tensor) -> tuple[Any, ...]:
    a, scale_a = quantize_fp8_groups(x)
    groups = torch.zeros(MANY, dtype=torch.int32)
    groups[128:] = 1
    return a, fp8(2, N, K), scale_a, torch.rand(2, 1, 2), groups, torch.float32


def masked(x: Tensor) -> tuple[Any, ...]:
    """Two groups of as many rows, all in use."""
    a = torch.stack([x, x.flip(1)])
    scale_a = torch.rand(2, x.shape[0], 2)
    used = torch.full((2,), MANY, dtype=torch.int32)
    return a.to(FP8), fp8(2, N, K), scale_a, torch.rand(2, 1, 2), used, 1, torch.float32


def heads(x: Tensor) -> tuple[Any, ...]:
    a = torch.stack([x, x.flip(1)], 1).to(FP8)
    return a, fp8(2, N, K), torch.rand(x.shape[0], 2, 2), torch.rand(2, 1, 2), torch.float32


Rows = Callable[[tuple[Any, ...], slice], tuple[Any, ...]]


def first_rows(*axes: tuple[int, int]) -> Rows:
    """Some rows of the arguments at these positions, along these axes."""

    def take(args: tuple[Any, ...], rows: slice) -> tuple[Any, ...]:
        taken = list(args)
        for at, axis in axes:
            if isinstance(taken[at], Tensor):
                taken[at] = taken[at][(slice(None),) * axis + (rows,)]
        return tuple(taken)

    return take


def masked_rows(args: tuple[Any, ...], rows: slice) -> tuple[Any, ...]:
    """The hint is what a kernel may choose by."""
    taken = list(first_rows((0, 1), (2, 1))(args, rows))
    taken[5] = max(1, taken[0].shape[1] // 2)
    return tuple(taken)


OPS: dict[str, tuple[str, Callable[[Tensor], tuple[Any, ...]], Rows, int]] = {
    "block_scaled_mm": ("block_scaled_mm", block_scaled, first_rows((0, 0), (2, 0)), 0),
    "block_scaled_mm, bf16": ("block_scaled_mm", block_scaled_bfloat16, first_rows((0, 0)), 0),
    "scaled_mm": ("scaled_mm", scaled, first_rows((0, 0), (2, 0)), 0),
    "router_gemm": ("router_gemm", router, first_rows((0, 0)), 0),
    "router_gemm, fp32": ("router_gemm", router_float32, first_rows((0, 0)), 0),
    "contiguous": (
        "grouped_block_scaled_mm", contiguous, first_rows((0, 0), (2, 0), (4, 0)), 0),
    "masked": ("grouped_block_scaled_mm_masked", masked, masked_rows, 1),
    "heads": ("fp8_bmm", heads, first_rows((0, 0), (2, 0)), 0),
}  # fmt: skip


def kernel_of(op: str) -> Kernel:
    definition = definition_of(getattr(torch.ops.compile_ext, op).default)
    assert definition is not None
    assert [k.name for k in definition.kernels][-2:] == ["reference", "batch_invariant"]
    return definition.kernels[-1]


def on(device: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.to(device) if isinstance(x, Tensor) else x for x in args)


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels on CPU tensors too, where the op runs the reference."""
    monkeypatch.setattr(batch_invariant, "runs_reference", lambda a: False)


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(("op", "make", "take", "axis"), OPS.values(), ids=OPS)
def test_bits(op: str, make: Any, take: Rows, axis: int, device: str) -> None:
    args = on(device, make(torch.randn(MANY, K).bfloat16()))
    run = kernel_of(op).run
    whole = run(*args)
    assert isinstance(whole, Tensor)
    for m in TOKENS:
        got = run(*take(args, slice(m)))
        assert isinstance(got, Tensor)
        assert torch.equal(got, whole.narrow(axis, 0, m)), f"M = {m}"


MODULES = {
    "block_scaled_mm": "block_scaled_mm_triton",
    "scaled_mm": "scaled_mm_triton",
    "router_gemm": "router_gemm_triton",
    "grouped_block_scaled_mm": "grouped_block_scaled_mm_triton",
    "grouped_block_scaled_mm_masked": "batched_block_scaled_mm_triton",
    "fp8_bmm": "batched_block_scaled_mm_triton",
}


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (0, 0)], ids=str)
@pytest.mark.parametrize(("op", "make", "take", "axis"), OPS.values(), ids=OPS)
def test_one_configuration(
    op: str, make: Any, take: Rows, axis: int, capability: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tile, warps and stages, as each device would get them: equal bits alone may be luck."""
    monkeypatch.setattr(triton_support, "_capability", lambda x: capability)
    launched: list[dict[str, Any]] = []

    class Launches:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **kwargs: launched.append(kwargs)

    module = import_module(f"compile_ext.ops.{MODULES[op]}")
    [kernel] = [x for x in vars(module) if x.endswith("_kernel")]
    monkeypatch.setattr(module, kernel, Launches())
    args = make(torch.randn(MANY, K).bfloat16())
    for m in range(1, MANY + 1):
        kernel_of(op).run(*take(args, slice(m)))
    assert len(launched) == MANY
    assert {"BLOCK_M", "BLOCK_N", "num_warps", "num_stages"} <= launched[0].keys()
    assert all(x == launched[0] for x in launched)


@pytest.mark.parametrize(("op", "make", "take", "axis"), OPS.values(), ids=OPS)
def test_bits_on_the_cpu(op: str, make: Any, take: Rows, axis: int) -> None:
    """The reference, a row at a time: of any rows, wherever they lie."""
    args = make(torch.randn(MANY, K).bfloat16())
    definition = definition_of(getattr(torch.ops.compile_ext, op).default)
    assert definition is not None
    run = kernel_of(op).run
    whole = run(*args)
    assert isinstance(whole, Tensor)
    for m in range(1, 65):
        assert torch.equal(run(*take(args, slice(m))), whole.narrow(axis, 0, m)), f"M = {m}"  # type: ignore[arg-type]
    if op != "grouped_block_scaled_mm_masked":
        assert torch.equal(run(*take(args, slice(7, 20))), whole.narrow(axis, 7, 13))  # type: ignore[arg-type]
    # The same numbers as the reference: K products in another order, of a magnitude near sqrt(K).
    reference = next(k for k in definition.kernels if k.name == "reference").run(*args)
    torch.testing.assert_close(whole, reference, rtol=2.0**-16, atol=2.0**-14)


@pytest.mark.parametrize("k", [128, 328])
@pytest.mark.parametrize("adds", [False, True])
def test_norms_have_a_rows_bits_whatever_m_is(k: int, adds: bool, device: str) -> None:
    """They need no kernel of that name: a row is a program, and what is launched depends on k."""
    x, residual = (torch.randn(20, k).bfloat16().to(device) for _ in range(2))
    weight = torch.randn(k).bfloat16().to(device)
    module = import_module("compile_ext.ops.rms_norm_quantize_fp8_triton")

    def run(m: int) -> tuple[Tensor, ...]:
        rest: Any = (weight, 1e-6, True)
        return module.run_add(x[:m], residual[:m], *rest) if adds else module.run(x[:m], *rest)  # type: ignore[no-any-return]

    whole = run(20)  # the interpreter takes 10 ms a row
    for m in (1, 2, 3, 17):
        for part, want in zip(run(m), whole, strict=True):
            assert torch.equal(part.float(), want[:m].float()), f"M = {m}"


@pytest.mark.parametrize("k", [128, 328, 7168])
def test_the_reference_of_the_norms_too(k: int) -> None:
    x, weight = torch.randn(64, k).bfloat16(), torch.randn(k)
    q, scale = rms_norm_quantize_fp8(x, weight)
    for m in range(1, 65):
        part, part_scale = rms_norm_quantize_fp8(x[:m], weight)
        assert torch.equal(part.float(), q[:m].float()), f"M = {m}"
        assert torch.equal(part_scale, scale[:m]), f"M = {m}"
