"""``why_not`` of the CUDA kernels, asked on fakes: no GPU is needed to say why one cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compile_ext.ops import block_scaled_mm_aten, router_gemm_aten, scaled_mm_aten

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> FakeTensorMode:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake(mode: FakeTensorMode, *shape: Any, dtype: torch.dtype = FP8) -> Any:
    with mode:
        return torch.empty(shape, dtype=dtype, device="cuda")


def scaled(mode: FakeTensorMode, m: Any, n: int, k: int, dtype: torch.dtype = BF16) -> str | None:
    scale_a, scale_b = (fake(mode, size, 1, dtype=torch.float32) for size in (m, n))
    a, b = fake(mode, m, k), fake(mode, n, k)
    return scaled_mm_aten.why_not(a, b, scale_a, scale_b, None, dtype)


def block_scaled(mode: FakeTensorMode, m: Any, n: int, k: int) -> str | None:
    scale_b = fake(mode, -(-n // 128), -(-k // 128), dtype=torch.float32)
    a, b = fake(mode, m, k, dtype=BF16), fake(mode, n, k)
    return block_scaled_mm_aten.why_not(a, b, None, scale_b, None, BF16)


def unbacked(mode: FakeTensorMode) -> Any:
    assert mode.shape_env is not None
    return mode.shape_env.create_unbacked_symint()


def test_scaled_mm_reasons(hopper: FakeTensorMode) -> None:
    assert scaled(hopper, 5, 64, 64) is None
    assert scaled(hopper, 5, 50, 64) == "needs N and K in multiples of 16, found N=50, K=64"
    assert scaled(hopper, 0, 64, 64) == "M is 0"
    wanted = "gives bfloat16 only, wanted torch.float32"
    assert scaled(hopper, 5, 64, 64, torch.float32) == wanted


def test_block_scaled_mm_reasons(hopper: FakeTensorMode) -> None:
    assert block_scaled(hopper, 5, 256, 512) is None
    assert block_scaled(hopper, 5, 192, 576) is None  # partial blocks
    wanted = "needs N and K in multiples of 16, found N=250, K=576"
    assert block_scaled(hopper, 5, 250, 576) == wanted
    assert block_scaled(hopper, 0, 256, 512) == "M is 0"


def test_an_m_known_only_at_run_time_is_no_reason(hopper: FakeTensorMode) -> None:
    m = unbacked(hopper)  # the tokens of one expert, chosen with nonzero()
    assert scaled(hopper, m, 64, 64) is None
    assert block_scaled(hopper, m, 256, 512) is None
    a, b = fake(hopper, m, 64, dtype=BF16), fake(hopper, 8, 64, dtype=BF16)
    assert router_gemm_aten.why_not(a, b, None) is None


def test_an_older_device_is_named(monkeypatch: pytest.MonkeyPatch, hopper: FakeTensorMode) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert scaled(hopper, 5, 64, 64) == "needs compute capability 8.9, the device has 8.0"
    assert block_scaled(hopper, 5, 256, 512) == "needs compute capability 9.0, the device has 8.0"
