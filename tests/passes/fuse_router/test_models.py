"""Decoder layers of transformers' mixture-of-experts models at one token: norm, router and choice
of experts are one op."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from moe_models import MODELS, SecondHalf

# Eager rounds the logits to bfloat16 (2^-9), and the results, which are below 8: two steps.
STEP = 2 * 8 * 2.0**-8
KERNELS = ("router_norm_kernel", "choice_kernel", "fused_kernel")


def ops_of(graph: str) -> str:
    """The calls of our ops, with the names of their operands taken away: they depend on the
    version of transformers."""
    calls = re.findall(r"compile_ext::(.*)", graph)
    return "\n".join(re.sub(r"%\d+|\barg\d+\b", "x", call) for call in calls)


@pytest.fixture
def rewritten(rewrite: Any) -> Any:
    def run(name: str, m: int = 1) -> tuple[str, list[tuple[bool, str]]]:
        torch.manual_seed(1)  # experts further apart than the rounding of eager's logits
        x, residual = (torch.randn(1, m, 64).bfloat16() for _ in range(2))
        options = {"compile_ext.memory_budget": 2**20}
        got = rewrite(SecondHalf(name), x, residual, tolerance=STEP, options=options)
        return ops_of(got.graph), got.of("fuse_router")

    return run


@pytest.mark.usefixtures(*KERNELS, "fused_choice_kernel")
@pytest.mark.parametrize("name", MODELS)
def test_one_launch(rewritten: Any, name: str) -> None:
    graph, said = rewritten(name)
    if name == "Llama4":  # router_topk has no form for it
        assert said == [(True, "residual, norm and router in one launch")]
        assert graph == "rms_norm_router(x, x, x, 1e-05, True, x, None)"
    else:
        assert said == [(True, "residual, norm, router and choice in one launch")]
        assert graph.count("\n") == 0
        assert graph.startswith("rms_norm_router_topk(x, x, x, 1e-0")


@pytest.mark.usefixtures(*KERNELS, "fused_choice_kernel")
def test_graph_of_deepseek_v3(rewritten: Any) -> None:
    assert_expected_inline(
        rewritten("DeepseekV3")[0],
        """\
rms_norm_router_topk(x, x, x, 1e-06, True, x, None, x, 2, sigmoid, 2, 1, -inf, True, 2.5)""",
    )


@pytest.mark.usefixtures(*KERNELS)
def test_graph_of_qwen3_moe_in_two_launches(rewritten: Any) -> None:
    assert_expected_inline(
        rewritten("Qwen3Moe")[0],
        """\
rms_norm_router(x, x, x, 1e-06, True, x, None)
router_topk(x, None, 2, softmax, 1, 1, 0.0, True, 1.0)""",
    )


@pytest.mark.usefixtures(*KERNELS)
def test_graph_of_gpt_oss_in_two_launches(rewritten: Any) -> None:
    assert_expected_inline(
        rewritten("GptOss")[0],
        """\
rms_norm_router(x, x, x, 1e-05, False, x, x)
router_topk(x, None, 2, softmax, 1, 1, 0.0, True, 1.0)""",
    )


@pytest.mark.usefixtures(*KERNELS)
def test_graph_of_several_tokens(rewritten: Any) -> None:
    assert_expected_inline(
        rewritten("DeepseekV3", m=5)[0],
        """\
add_rms_norm(x, x, x, 1e-06, True)
router_gemm(x, x, None)
router_topk(x, x, 2, sigmoid, 2, 1, -inf, True, 2.5)""",
    )
