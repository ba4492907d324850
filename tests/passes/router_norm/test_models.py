"""The norms before the routers of transformers' mixture-of-experts models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_models import MODELS, SecondHalf
from routed_model import PASS, SUM, tokens

# Eager rounds the logits to bfloat16 (2^-9), and the results, which are below 8: two steps.
STEP = 2 * 8 * 2.0**-8


@pytest.mark.parametrize("m", [1, 5, "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_and_the_norm_are_one_op(rewrite: Any, name: str, m: Any) -> None:
    torch.manual_seed(1)  # experts further apart than the rounding of eager's logits
    x, residual = (tokens(1, 5 if m == "dynamic" else m, 64) for _ in range(2))
    for t in (x, residual) if m == "dynamic" else ():
        torch._dynamo.mark_dynamic(t, 1)
    options = {"compile_ext.memory_budget": 2**20}
    got = rewrite(SecondHalf(name), x, residual, tolerance=STEP, options=options)
    assert got.of(PASS) == [SUM]
    assert got.graph.count("compile_ext::add_rms_norm(") == 1
    assert "rsqrt" not in got.graph
