"""A seal puts no function on the path of a call that compiles nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import compile_ext
from compile_ext.ops.quantize import quantize_fp8_blocks, quantize_fp8_groups

Call = Callable[[], object]


def functions(call: Call) -> list[str]:
    """What a call of ``call`` runs, of Python and of C, in order."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            code = frame.f_code
            seen.append(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}")
        elif event == "c_call":
            seen.append(function.__qualname__)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def compiled(backend: str) -> Call:
    torch._dynamo.reset()
    model = torch.compile(nn.Linear(16, 8).requires_grad_(False), backend=backend)
    x = torch.randn(4, 16)
    return lambda: model(x)


def router(kernel: str, device: str) -> Call:
    a = torch.randn(4, 2048, device=device).bfloat16()
    b = torch.randn(16, 2048, device=device).bfloat16()
    return lambda: torch.ops.compile_ext.router_gemm(a, b, None, pinned=kernel)


def fp8(kernel: str) -> Call:
    a, scale_a = quantize_fp8_groups(torch.randn(64, 512, device="cuda"))
    b, scale_b = quantize_fp8_blocks(torch.randn(512, 512, device="cuda"))
    return lambda: torch.ops.compile_ext.block_scaled_mm(
        a, b, scale_a, scale_b, None, torch.bfloat16, pinned=kernel
    )


CALLS = [
    pytest.param(partial(compiled, "eager"), id="eager"),
    pytest.param(partial(compiled, "inductor"), id="inductor"),
    pytest.param(partial(compiled, "compile_ext"), id="compile_ext"),
    pytest.param(partial(router, "reference", "cpu"), id="reference"),
    pytest.param(partial(router, "triton_small_m", "cuda"), id="triton", marks=pytest.mark.gpu),
    pytest.param(partial(fp8, "deep_gemm"), id="deep_gemm", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("make", CALLS)
def test_a_call_runs_the_same_functions(make: Callable[[], Call]) -> None:
    run = make()
    with torch.inference_mode():
        run()
        run()
        without = functions(run)
        with compile_ext.seal("error"):
            under = functions(run)
    assert under == without
    assert len(under) > 10  # the call was seen
