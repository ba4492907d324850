"""The routers of transformers' mixture-of-experts models: the graph around the op, and the values.

Only what the router is made of, to the choice of experts: the rest depends on the version.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from moe_models import MODELS, experts_of
from router_model import PASS, tokens

FLOAT32 = {"compile_ext.memory_budget": 2**20}
# Eager rounds the logits to bfloat16 (2^-9), and the results, which are below 0.125: two steps.
STEP = 2 * 0.125 * 2.0**-8


def router_of(graph: str) -> str:
    """The lines from the router to the last top-k, with those that give it its operands, values and
    arguments numbered anew."""
    lines = graph.splitlines()
    start = next(i for i, line in enumerate(lines) if "router_gemm" in line)
    end = max(i for i, line in enumerate(lines) if "topk(" in line)
    wanted = set(range(start, end + 1))
    todo = re.findall(r"%\d+|arg\d+", lines[start].split("=", 1)[1])
    while todo:
        name = todo.pop()
        at = next(i for i, line in enumerate(lines) if line.split(":")[0].split(" ")[0] == name)
        if at not in wanted:
            wanted.add(at)
            todo += re.findall(r"%\d+|arg\d+", lines[at].partition("=")[2])
    names: dict[str, str] = {}
    return re.sub(
        r"%\d+|\barg\d+\b",
        lambda match: names.setdefault(match[0], f"{match[0].rstrip('0123456789')}{len(names)}"),
        "\n".join(lines[i] for i in sorted(wanted)),
    )


@pytest.fixture
def rewritten(rewrite: Any) -> Any:
    """``rewritten(name, m, **options)``: the experts of a model, and what the pass said."""

    def run(name: str, m: int = 5, **options: Any) -> tuple[str, list[tuple[bool, str]]]:
        got = rewrite(experts_of(name), tokens(1, m, 64), tolerance=STEP, options=options)
        return router_of(got.graph), got.of(PASS)

    return run


def test_qwen3_moe(rewritten: Any) -> None:
    graph, said = rewritten("Qwen3Moe")
    assert said == [(True, "logits stay in float32")]
    assert_expected_inline(
        graph,
        """\
arg0: bfloat16[1, 5, 64]
arg1: bfloat16[8, 64]
%2: bfloat16[5, 64] = .view(arg0, -1, 64)
%3: bfloat16[5, 64] = .reshape(%2, -1, 64)
%4: float32[5, 8] = compile_ext::router_gemm(%3, arg1, None)
%5: float32[5, 8] = softmax(%4, dim=-1, dtype=float32)
%6 = topk(%5, 2, dim=-1)""",
    )


def test_mixtral(rewritten: Any) -> None:
    graph, said = rewritten("Mixtral")
    assert said == [(True, "logits stay in float32")]
    assert_expected_inline(
        graph,
        """\
arg0: bfloat16[1, 5, 64]
arg1: bfloat16[6, 64]
%2: bfloat16[5, 64] = .view(arg0, -1, 64)
%3: bfloat16[5, 64] = .reshape(%2, -1, 64)
%4: float32[5, 6] = compile_ext::router_gemm(%3, arg1, None)
%5: float32[5, 6] = softmax(%4, dim=-1)
%6 = topk(%5, 2, dim=-1)""",
    )


def test_gpt_oss(rewritten: Any) -> None:
    graph, said = rewritten("GptOss")
    assert said == [(True, "logits in float32, bfloat16 for topk")]
    assert_expected_inline(
        graph,
        """\
arg0: bfloat16[1, 5, 64]
arg1: bfloat16[6, 64]
arg2: bfloat16[6]
%3: bfloat16[5, 64] = .reshape(arg0, -1, 64)
%4: float32[5, 6] = compile_ext::router_gemm(%3, arg1, arg2)
%5: bfloat16[5, 6] = .to(%4, bfloat16)
%6 = topk(%5, 2, dim=-1)""",
    )


def test_llama4(rewritten: Any) -> None:
    graph, said = rewritten("Llama4")
    assert said == [(True, "logits in float32, bfloat16 for topk, full_like, output")]
    assert_expected_inline(
        graph,
        """\
arg0: bfloat16[1, 5, 64]
arg1: bfloat16[6, 64]
%2: bfloat16[5, 64] = .reshape(arg0, -1, 64)
%3: float32[5, 6] = compile_ext::router_gemm(%2, arg1, None)
%4: bfloat16[5, 6] = .to(%3, bfloat16)
%5 = topk(%4, 2, dim=1)""",
    )


def test_deepseek_v3(rewritten: Any) -> None:
    graph, said = rewritten("DeepseekV3", **FLOAT32)
    assert said == [(True, "logits stay in float32")]
    assert_expected_inline(
        graph,
        """\
arg0: bfloat16[1, 5, 64]
arg1: float32[8, 64] = type
%2: bfloat16[5, 64] = .view(arg0, -1, 64)
%3: float32[5, 8] = compile_ext::router_gemm(%2, arg1, None)
%4: float32[5, 8] = .sigmoid(%3)
%5: float32[5, 8] = add(%4, arg6)
%7: float32[5, 2, 4] = .view(%5, -1, 2, 4)
%8 = .topk(%7, 2, dim=-1)
%9: float32[5, 2, 2] = getitem(%8, 0)
%10: float32[5, 2] = .sum(%9, dim=-1)
%11 = topk(%10, dim=-1, k=1, sorted=False)
%12: int64[5, 1] = getitem(%11, 1)
%13: float32[5, 2] = zeros_like(%10)
%14: float32[5, 2] = .scatter_(%13, 1, %12, 1)
%15: float32[5, 2, 1] = .unsqueeze(%13, -1)
%16: float32[5, 2, 4] = .expand(%15, -1, 2, 4)
%17: float32[5, 8] = .reshape(%16, -1, 8)
%18: bool[5, 8] = .bool(%17)
%19: bool[5, 8] = invert(%18)
%20: float32[5, 8] = .masked_fill(%5, %19, -inf)
%21 = topk(%20, dim=-1, k=2, sorted=False)""",
    )


def test_deepseek_v3_in_bfloat16(rewritten: Any) -> None:
    graph, said = rewritten("DeepseekV3", **FLOAT32, **{"compile_ext.bf16_router": True})
    assert said == [(True, "logits stay in float32; the weight as the bfloat16 that it was")]
    assert_expected_inline(
        graph,
        """\
arg0: bfloat16[1, 5, 64]
arg1: bfloat16[8, 64]
%2: bfloat16[5, 64] = .view(arg0, -1, 64)
%3: float32[5, 8] = compile_ext::router_gemm(%2, arg1, None)
%4: float32[5, 8] = .sigmoid(%3)
%5: float32[5, 8] = add(%4, arg6)
%7: float32[5, 2, 4] = .view(%5, -1, 2, 4)
%8 = .topk(%7, 2, dim=-1)
%9: float32[5, 2, 2] = getitem(%8, 0)
%10: float32[5, 2] = .sum(%9, dim=-1)
%11 = topk(%10, dim=-1, k=1, sorted=False)
%12: int64[5, 1] = getitem(%11, 1)
%13: float32[5, 2] = zeros_like(%10)
%14: float32[5, 2] = .scatter_(%13, 1, %12, 1)
%15: float32[5, 2, 1] = .unsqueeze(%13, -1)
%16: float32[5, 2, 4] = .expand(%15, -1, 2, 4)
%17: float32[5, 8] = .reshape(%16, -1, 8)
%18: bool[5, 8] = .bool(%17)
%19: bool[5, 8] = invert(%18)
%20: float32[5, 8] = .masked_fill(%5, %19, -inf)
%21 = topk(%20, dim=-1, k=2, sorted=False)""",
    )


def test_glm4_moe(rewritten: Any) -> None:
    graph, said = rewritten("Glm4Moe", **FLOAT32)
    assert said == [(True, "logits stay in float32")]
    assert_expected_inline(
        graph,
        """\
arg0: bfloat16[1, 5, 64]
arg1: float32[8, 64] = type
%2: bfloat16[5, 64] = .view(arg0, -1, 64)
%3: float32[5, 8] = compile_ext::router_gemm(%2, arg1, None)
%4: float32[5, 8] = .sigmoid(%3)
%5: float32[5, 8] = add(%4, arg6)
%7: float32[5, 1, 8] = .view(%5, -1, 1, 8)
%8 = .topk(%7, 2, dim=-1)
%9: float32[5, 1, 2] = getitem(%8, 0)
%10: float32[5, 1] = .sum(%9, dim=-1)
%11 = topk(%10, dim=-1, k=1, sorted=False)
%12: int64[5, 1] = getitem(%11, 1)
%13: float32[5, 1] = zeros_like(%10)
%14: float32[5, 1] = .scatter_(%13, 1, %12, 1)
%15: float32[5, 1, 1] = .unsqueeze(%13, -1)
%16: float32[5, 1, 8] = .expand(%15, -1, 1, 8)
%17: float32[5, 8] = .reshape(%16, -1, 8)
%18: bool[5, 8] = .bool(%17)
%19: bool[5, 8] = invert(%18)
%20: float32[5, 8] = .masked_fill(%5, %19, -inf)
%21 = topk(%20, dim=-1, k=2, sorted=False)""",
    )


@pytest.mark.parametrize("name", MODELS)
def test_one_token(rewritten: Any, name: str) -> None:
    graph, _ = rewritten(name, m=1)
    assert graph.count("compile_ext::router_gemm_m1(") == 1


@pytest.mark.parametrize("name", MODELS)
def test_dynamic_m(rewrite: Any, name: str) -> None:
    torch.manual_seed(1)  # experts further apart than the rounding of eager's logits
    x = tokens(1, 5, 64)
    torch._dynamo.mark_dynamic(x, 1)
    got = rewrite(experts_of(name), x, tolerance=STEP)
    assert [fired for fired, _ in got.of(PASS)] == [True]
    assert re.search(r"float32\[s\d, \d\] = compile_ext::router_gemm\(", got.graph)
