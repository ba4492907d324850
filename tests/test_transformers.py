"""Mixture-of-experts models of transformers, unmodified: the routers get their op, or the report
says why not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_models import ROUTERS, SIZES, tiny
from torch import Tensor

import compile_ext

EAGER: dict[str, Any] = {"compile_ext.inner": "eager"}
STAYS = "logits stay in float32"
BFLOAT16 = "logits in float32, bfloat16 for"


def tokens(m: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (1, m))


def run(model: Any, compiled: Any, m: int, steps: float) -> None:
    """Compare with eager on m tokens; ``steps`` of bfloat16 at the largest logit are allowed."""
    x = tokens(m)
    with torch.inference_mode():
        want = model(x, use_cache=False).logits
        got = compiled(x, use_cache=False).logits
    assert want.shape == got.shape == (1, m, SIZES["vocab_size"])
    largest = float(want.abs().max())
    assert float((want - got).abs().max()) <= steps * 2.0**-7 * largest


def compiled_and_run(name: str, steps: float) -> compile_ext.Report:
    model = tiny(name, layers=2)
    compiled = torch.compile(model, backend="compile_ext", fullgraph=True, options=EAGER)
    run(model, compiled, 5, steps)
    run(model, compiled, 1, steps)
    report = compile_ext.explain(model)
    assert report.fallbacks == ()
    assert report.graphs == 2
    return report


def decisions(report: compile_ext.Report, pass_name: str) -> dict[tuple[str, str], str]:
    """(module, op) -> what the pass said there."""
    return {
        (row.module, row.op): ("" if d.fired else "not: ") + d.detail
        for row in report.rows
        for d in row.decisions
        if d.pass_name == pass_name
    }


# Eager rounds the logits of Qwen3 and Mixtral to bfloat16, the rewritten graph does not: the
# experts' weights move by at most 2^-9 of a logit, and all that follows is rounded to bfloat16.
# Measured: one step. The others differ in the order of the sum alone.
@pytest.mark.parametrize(
    ("name", "said", "steps"),
    [
        ("Qwen3Moe", STAYS, 2),
        ("Mixtral", STAYS, 2),
        ("GptOss", f"{BFLOAT16} topk", 1),
        ("Llama4", f"{BFLOAT16} topk, full_like", 1),
        ("DeepseekV3", STAYS, 1),
        ("Glm4Moe", STAYS, 1),
    ],
)
def test_routers_are_lowered(name: str, said: str, steps: float) -> None:
    report = compiled_and_run(name, steps)
    routers = [f"model.layers.{i}.{ROUTERS[name]}" for i in range(2)]
    ops = ("compile_ext::router_gemm", "compile_ext::router_gemm_m1")
    assert decisions(report, "lower_router_linear") == {
        (router, op): said for router in routers for op in ops
    }
    m1 = ("not: M = 5", "M == 1: compile_ext::router_gemm_m1")
    assert decisions(report, "specialize_m1") == {
        (router, op): text for router in routers for op, text in zip(ops, m1, strict=True)
    }


@pytest.mark.slow
def test_with_inductor() -> None:
    """Inductor also keeps float32 where eager rounds to bfloat16: between all pointwise ops."""
    model = tiny("Qwen3Moe", layers=2)
    compiled = torch.compile(model, backend="compile_ext", fullgraph=True)
    run(model, compiled, 5, steps=8)
    run(model, compiled, 1, steps=8)
    assert compile_ext.explain(model).graphs == 2
