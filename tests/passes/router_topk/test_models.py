"""The choice of experts of transformers' mixture-of-experts models: the graph and the values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from choice_model import PASS
from expecttest import assert_expected_inline
from moe_models import MODELS, experts_of

# What their float32 routers derive from a bfloat16 weight.
BUDGET = {"compile_ext.memory_budget": 2**20}
# Eager rounds the logits to bfloat16 (2^-9), and the results, which are below 0.125: two steps.
STEP = 2 * 0.125 * 2.0**-8
# gpt-oss hands out its weights in bfloat16, whose steps below 1 are 2^-8.
STEPS = {"GptOss": 2.0**-8}
CHOSEN = [name for name in MODELS if name != "Llama4"]


def choice_of(graph: str) -> str:
    """The lines of the router and of its choice, with what reads the weights and the ids first."""
    lines = graph.splitlines()
    start = next(i for i, line in enumerate(lines) if "compile_ext::router_gemm" in line)
    end = max(i for i, line in enumerate(lines) if "router_topk(" in line or "getitem(%" in line)
    wanted = [x for x in lines[start : end + 1] if re.search(r"router_|getitem\(%", x)]
    names: dict[str, str] = {}
    return re.sub(
        r"%\d+|\barg\d+\b",
        lambda match: names.setdefault(match[0], f"{match[0].rstrip('0123456789')}{len(names)}"),
        "\n".join(wanted[:4]),
    )


@pytest.fixture
def rewritten(rewrite: Any) -> Any:
    """``rewritten(name)``: the lines of a model's choice, and what the pass said."""

    def run(name: str, m: int = 5) -> tuple[str, list[tuple[bool, str]]]:
        torch.manual_seed(1)  # experts further apart than the rounding of eager's logits
        experts, x = experts_of(name), torch.randn(1, m, 64).bfloat16()
        got = rewrite(experts, x, tolerance=STEPS.get(name, STEP), options=BUDGET)
        assert not re.search(r"[ .](topk|softmax|gather|scatter_)\(", got.graph)
        return choice_of(got.graph), got.of(PASS)

    return run


def test_qwen3_moe(rewritten: Any) -> None:
    graph, said = rewritten("Qwen3Moe")
    assert said == [(True, "top 2 of 8, softmax")]
    assert_expected_inline(
        graph,
        """\
%0: float32[5, 8] = compile_ext::router_gemm(%1, arg2, None)
%3 = compile_ext::router_topk(%0, None, 2, softmax, 1, 1, 0.0, True, 1.0)
%4: float32[5, 2] = getitem(%3, 0)
%5: int64[5, 2] = getitem(%3, 1)""",
    )


def test_mixtral(rewritten: Any) -> None:
    graph, said = rewritten("Mixtral")
    assert said == [(True, "top 2 of 6, softmax")]
    assert_expected_inline(
        graph,
        """\
%0: float32[5, 6] = compile_ext::router_gemm(%1, arg2, None)
%3 = compile_ext::router_topk(%0, None, 2, softmax, 1, 1, 0.0, True, 1.0)
%4: float32[5, 2] = getitem(%3, 0)
%5: int64[5, 2] = getitem(%3, 1)""",
    )


def test_gpt_oss(rewritten: Any) -> None:
    graph, said = rewritten("GptOss")
    assert said == [(True, "top 2 of 6, softmax")]
    assert_expected_inline(
        graph,
        """\
%0: float32[5, 6] = compile_ext::router_gemm(%1, arg2, arg3)
%4 = compile_ext::router_topk(%0, None, 2, softmax, 1, 1, 0.0, True, 1.0)
%5: float32[5, 2] = getitem(%4, 0)
%6: int64[5, 2] = getitem(%4, 1)""",
    )


def test_deepseek_v3(rewritten: Any) -> None:
    graph, said = rewritten("DeepseekV3")
    assert said == [(True, "top 2 of 8, sigmoid, bias, 1 of 2 groups")]
    assert_expected_inline(
        graph,
        """\
%0: float32[5, 8] = compile_ext::router_gemm(%1, arg2, None)
%3 = compile_ext::router_topk(%0, arg4, 2, sigmoid, 2, 1, -inf, True, 2.5)
%5: float32[5, 2] = getitem(%3, 0)
%6: int64[5, 2] = getitem(%3, 1)""",
    )


def test_glm4_moe(rewritten: Any) -> None:
    graph, said = rewritten("Glm4Moe")
    assert said == [(True, "top 2 of 8, sigmoid, bias")]  # of its one group
    assert_expected_inline(
        graph,
        """\
%0: float32[5, 8] = compile_ext::router_gemm(%1, arg2, None)
%3 = compile_ext::router_topk(%0, arg4, 2, sigmoid, 1, 1, 0.0, True, 1.0)
%5: float32[5, 2] = getitem(%3, 0)
%6: int64[5, 2] = getitem(%3, 1)""",
    )


def test_not_llama4(rewrite: Any) -> None:
    """It weighs all experts, most of them with the sigmoid of minus infinity."""
    got = rewrite(experts_of("Llama4"), torch.randn(1, 5, 64).bfloat16(), tolerance=STEP)
    reason = "the weights come from the logits, and not from a softmax or sigmoids of the logits"
    assert got.of(PASS) == [(False, reason)]


@pytest.mark.parametrize("name", CHOSEN)
def test_one_token(rewritten: Any, name: str) -> None:
    graph, said = rewritten(name, m=1)
    assert [fired for fired, _ in said] == [True]
    assert "compile_ext::router_gemm_m1(" in graph


@pytest.mark.parametrize("name", CHOSEN)
def test_dynamic_m(rewrite: Any, name: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(1, 5, 64).bfloat16()
    torch._dynamo.mark_dynamic(x, 1)
    got = rewrite(experts_of(name), x, tolerance=STEPS.get(name, STEP), options=BUDGET)
    assert [fired for fired, _ in got.of(PASS)] == [True]
    assert re.search(r"float32\[s\d, 2\] = getitem\(%\d+, 0\)", got.graph)
