"""Norms and routers that fuse_router leaves alone, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_model import (
    FIRED,
    LOGITS,
    PASS,
    TOP_K,
    K,
    Model,
    plain,
    router_m1,
    tokens,
)
from torch import Tensor

from compile_ext.ops import rms_norm, router_gemm, router_topk

pytestmark = pytest.mark.usefixtures("fused_kernel")


def test_not_where_m_is_not_one(rewrite: Any) -> None:
    got = rewrite(Model(plain), tokens(2, K))
    assert got.of(PASS) == []
    assert "rms_norm_router" not in got.graph


def test_not_a_norm_of_others(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        return router_gemm(rms_norm(x, m.norm).sin(), m.w), router_gemm(x, m.w)

    assert rewrite(Model(body), tokens(1, K)).of(PASS) == []


def skipped(rewrite: Any, body: Callable[..., Any], **options: Any) -> str:
    """Why a body is left alone."""
    got = rewrite(Model(body), tokens(1, K), **options)
    fired, reason = got.of(PASS)[-1]
    assert not fired
    assert "rms_norm_router" not in got.graph
    return reason


@pytest.mark.parametrize("through_a_view", [False, True])
def test_not_where_the_norm_is_written(rewrite: Any, through_a_view: bool) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        (y.t() if through_a_view else y).mul_(2.0)
        return router_gemm(y, m.w), y

    assert skipped(rewrite, body) == "the graph writes the normed activation"


def test_not_where_a_weight_is_computed_behind_the_norm(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        return router_m1(y, (m.w * y.sum()).bfloat16()), y

    assert skipped(rewrite, body) == "b is computed behind the norm"


def test_not_where_a_weight_is_written(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        logits = router_m1(y, m.w, m.bias)
        m.bias.mul_(1.0)
        return logits

    assert skipped(rewrite, body) == "the graph writes bias"


@pytest.mark.usefixtures("fused_choice_kernel")
def test_the_choice_stays_where_its_bias_is_written(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        chosen = router_topk(router_m1(rms_norm(x, m.norm), m.w), m.choice_bias, top_k=TOP_K)
        m.choice_bias.mul_(1.0)
        return chosen

    got = rewrite(Model(body), tokens(1, K), tolerance=LOGITS)
    assert got.of(PASS) == FIRED
    assert "compile_ext::router_topk(" in got.graph


def test_not_where_a_kernel_is_named(rewrite: Any) -> None:
    options = {"compile_ext.kernels": {"router_gemm": "reference"}}
    reason = skipped(rewrite, plain, options=options)
    assert reason == "compile_ext.kernels names a kernel of router_gemm"

    def body(m: Model, x: Tensor) -> Any:
        y = torch.ops.compile_ext.rms_norm(x, m.norm, 1e-6, True, pinned="reference")
        return router_gemm(y, m.w)

    assert skipped(rewrite, body) == "the call of rms_norm names reference"


def test_not_under_batch_invariant(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        return router_m1(y, m.w)

    reason = skipped(rewrite, body, tolerance=LOGITS, options={"compile_ext.batch_invariant": True})
    assert reason == "compile_ext.batch_invariant wants one op for every M"


def test_not_under_autocast(rewrite: Any) -> None:
    def body(m: Model, x: Tensor) -> Any:
        y = rms_norm(x, m.norm)
        with torch.autocast("cpu", torch.bfloat16):
            return router_m1(y, m.w)

    assert skipped(rewrite, body) == "it is inside an autocast region"


class TestWithoutAKernel:
    @pytest.fixture
    def fused_kernel(self) -> None:
        """In the place of the kernel that the other tests see."""

    def test_not_where_the_op_would_run_its_reference(self, rewrite: Any) -> None:
        assert "triton: runs on CUDA" in skipped(rewrite, plain)
