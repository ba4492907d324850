"""Mixture-of-experts models of transformers, unmodified: the routers get their op, or the report
says why not.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import GraphModule

import compile_ext
from compile_ext.passes import PassContext, copy_module, print_graph, run_passes

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip(
    "transformers", reason="needs the extra 'transformers': pip install 'compile-ext[transformers]'"
)

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
SHARED_EXPERTS = {"n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 1}
# One model of each kind: its name in transformers, and what its configuration has beyond SIZES.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 6},
    "GptOss": {"num_local_experts": 6},
    "DeepseekV3": {**SHARED_EXPERTS, **LATENT_ATTENTION, "n_group": 2, "topk_group": 1},
    "Glm4Moe": {**SHARED_EXPERTS, "n_group": 1, "topk_group": 1},
}
ROUTERS = {"Qwen3Moe": "gate", "Mixtral": "gate", "GptOss": "router"}
EAGER: dict[str, Any] = {"compile_ext.inner": "eager"}


def tiny(name: str) -> Any:
    config = getattr(transformers, f"{name}Config")(
        **{k: v for k, v in {**SIZES, **MODELS[name]}.items() if v is not None},
        **({"first_k_dense_replace": 0} if "n_routed_experts" in MODELS[name] else {}),
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p.normal_(0, 0.05)
    return model


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
    model = tiny(name)
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


# The router's logits stay in float32, eager rounds them to bfloat16: the weights of the experts
# move by at most 2^-9 of a logit, and all that follows is rounded to bfloat16. Measured: one step.
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_routers_are_lowered(name: str) -> None:
    report = compiled_and_run(name, steps=2)
    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)]
    ops = ("compile_ext::router_gemm", "compile_ext::router_gemm_m1")
    assert decisions(report, "lower_router_linear") == {
        (router, op): "logits stay in float32" for router in routers for op in ops
    }
    said = ("not: M = 5", "M == 1: compile_ext::router_gemm_m1")
    assert decisions(report, "specialize_m1") == {
        (router, op): text for router in routers for op, text in zip(ops, said, strict=True)
    }


def test_gpt_oss_keeps_its_routers() -> None:
    """It takes the top-k of the bfloat16 logits: lowering would change which experts are chosen."""
    report = compiled_and_run("GptOss", steps=0)
    found = decisions(report, "lower_router_linear")
    assert {module for module, _ in found} == {f"model.layers.{i}.mlp.router" for i in range(2)}
    for text in found.values():
        assert re.fullmatch(r"not: \w+ reads the bfloat16 logits", text)


@pytest.mark.parametrize("name", ["DeepseekV3", "Glm4Moe"])
def test_float32_routers_are_kept(name: str) -> None:
    """They compute their router in float32, on a float32 copy of the weight."""
    report = compiled_and_run(name, steps=0)
    found = decisions(report, "lower_router_linear")
    reason = "not: x is float32 and the weight float32, not bfloat16"
    assert found == {(f"model.layers.{i}.mlp.gate", "linear"): reason for i in range(2)}


def test_graph_around_the_router() -> None:
    graphs: list[str] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        ctx = PassContext(copy_module(gm), inputs)
        run_passes(ctx)
        graphs.append(print_graph(ctx.root))
        return gm.forward

    with torch.inference_mode():
        torch.compile(tiny("Qwen3Moe"), backend=backend, fullgraph=True)(tokens(5), use_cache=False)
    assert_expected_inline(
        around(graphs[0], first="router_gemm", last="topk"),
        """\
%0: float32[5, 8] = compile_ext::router_gemm(%1, arg2, None)
%3: float32[5, 8] = softmax(%0, dim=-1, dtype=float32)
%4 = topk(%3, 2, dim=-1)""",
    )


def around(graph: str, first: str, last: str) -> str:
    """The lines between the first that calls one op and the next that calls another, with values
    and arguments numbered anew: other numbers depend on the version of transformers.
    """
    lines = graph.splitlines()
    start = next(i for i, line in enumerate(lines) if f"{first}(" in line)
    end = next(i for i in range(start, len(lines)) if f"{last}(" in lines[i])
    names: dict[str, str] = {}
    return re.sub(
        r"%\d+|\barg\d+\b",
        lambda match: names.setdefault(match[0], f"{match[0].rstrip('0123456789')}{len(names)}"),
        "\n".join(lines[start : end + 1]),
    )


@pytest.mark.slow
def test_with_inductor() -> None:
    """Inductor also keeps float32 where eager rounds to bfloat16: between all pointwise ops."""
    model = tiny("Qwen3Moe")
    compiled = torch.compile(model, backend="compile_ext", fullgraph=True)
    run(model, compiled, 5, steps=8)
    run(model, compiled, 1, steps=8)
    assert compile_ext.explain(model).graphs == 2
