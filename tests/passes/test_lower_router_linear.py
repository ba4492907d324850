"""lower_router_linear: the router of a mixture-of-experts layer becomes router_gemm, in every
spelling.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PASS = "lower_router_linear"
# Eager rounds the logits to bfloat16 (2^-9 relative; they stay below 8), the rewritten graph does
# not.
LOGITS = 8 * 2.0**-9


def two_casts(y: Tensor) -> tuple[Tensor, Tensor]:
    return y.float(), y.to(torch.float32)


SPELLINGS = {
    "float": lambda x, w: F.linear(x, w).float(),
    "to": lambda x, w: F.linear(x, w).to(torch.float32),
    "to keyword": lambda x, w: F.linear(x, w).to(dtype=torch.float32),
    "type": lambda x, w: F.linear(x, w).type(torch.float32),
    "softmax dtype": lambda x, w: F.softmax(F.linear(x, w), dim=-1, dtype=torch.float32),
    "torch.softmax": lambda x, w: torch.softmax(F.linear(x, w), -1, dtype=torch.float32),
    "method softmax": lambda x, w: F.linear(x, w).softmax(-1, dtype=torch.float32),
    "keyword": lambda x, w: F.linear(input=x, weight=w).float(),
    "no bias": lambda x, w: F.linear(x, w, None).float(),
    "aten packet": lambda x, w: torch.ops.aten.linear(x, w).float(),
    "aten overload": lambda x, w: torch.ops.aten.linear.default(x, w).float(),
    "two casts": lambda x, w: two_casts(F.linear(x, w)),
}


class Router(nn.Module):
    def __init__(self, spelling: Any, n: int = 16, k: int = 32) -> None:
        super().__init__()
        self.spelling = spelling
        self.w = nn.Parameter(torch.randn(n, k).bfloat16() / 4)

    def forward(self, x: Tensor) -> Any:
        return self.spelling(x, self.w)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling(rewrite: Any, spelling: Any) -> None:
    got = rewrite(Router(spelling), tokens(5, 32), tolerance=LOGITS)
    assert got.of(PASS) == [(True, "logits stay in float32")]
    assert "compile_ext::router_gemm(" in got.graph
    assert "linear" not in got.graph


def test_graph(rewrite: Any) -> None:
    x = tokens(5, 32)
    torch._dynamo.mark_dynamic(x, 0)
    got = rewrite(
        Router(lambda x, w: torch.topk(F.linear(x, w).float().softmax(-1), 2).values),
        x,
        tolerance=LOGITS,
    )
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[16, 32]
arg2: bfloat16[s0, 32]
%0: float32[s0, 16] = compile_ext::router_gemm(arg2, arg0, None)
%1: float32[s0, 16] = .softmax(%0, -1)
%2 = topk(%1, 2)
%3: float32[s0, 2] = getitem(%2, 0)
return [%3]""",
    )


def test_module_with_bias_and_leading_dimensions(rewrite: Any) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 16).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(x).float()

    got = rewrite(Gate(), tokens(2, 3, 32), tolerance=LOGITS)
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[16, 32]
arg1: bfloat16[16]
arg2: bfloat16[2, 3, 32]
%0: float32[2, 3, 16] = compile_ext::router_gemm(arg2, arg0, arg1)
return [%0]""",
    )


def test_logits_are_those_of_float32() -> None:
    model, x = Router(SPELLINGS["float"]), tokens(5, 32)
    with torch.no_grad():
        compiled = torch.compile(
            model, backend="compile_ext", options={"compile_ext.inner": "eager"}
        )
        assert torch.equal(compiled(x), F.linear(x.float(), model.w.float()))


def test_in_a_subgraph_and_after_a_graph_break(rewrite: Any) -> None:
    class Checkpointed(Router):
        def forward(self, x: Tensor) -> Any:
            torch._dynamo.graph_break()
            return checkpoint(super().forward, x, use_reentrant=False)

    got = rewrite(Checkpointed(SPELLINGS["float"]), tokens(5, 32), tolerance=LOGITS)
    assert got.of(PASS) == [(True, "logits stay in float32")]
    assert "router_gemm" in got.graph


def test_idempotent(rewrite: Any) -> None:
    got = rewrite(Router(SPELLINGS["softmax dtype"]), tokens(5, 32), tolerance=LOGITS)
    from compile_ext.passes import PassContext, run_passes

    before = got.graph
    run_passes(PassContext(got.modules[-1], [tokens(1)] * 2))
    assert got.graph == before


def test_not_an_ordinary_linear(rewrite: Any) -> None:
    got = rewrite(Router(lambda x, w: F.linear(x, w)), tokens(5, 32))
    assert got.of(PASS) == []  # no candidate: nothing reads it in float32, no top-k behind it


def test_not_a_projection_with_a_norm_behind_it(rewrite: Any) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:  # DeepSeek's q_a_proj: RMSNorm casts to float32
        y = F.linear(x, w).float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))).bfloat16()

    assert rewrite(Router(norm), tokens(5, 32)).of(PASS) == []


def test_not_a_residual_stream_in_float32(rewrite: Any) -> None:
    got = rewrite(Router(lambda x, w: x.float() + F.linear(x, w).float(), n=32), tokens(5, 32))
    assert got.of(PASS) == []


def test_not_a_float32_linear_that_the_graph_hands_out(rewrite: Any) -> None:
    got = rewrite(Router(lambda x, w: F.linear(x.float(), w.float()).float()), tokens(5, 32))
    assert got.of(PASS) == []


def test_not_a_float32_router_but_it_is_named(rewrite: Any) -> None:
    def routed(x: Tensor, w: Tensor) -> Tensor:  # DeepSeek-V3 and GLM-4 MoE
        scores = F.linear(x.type(torch.float32), w.type(torch.float32)).sigmoid()
        return torch.topk((scores.view(-1, 16) + 0.5).view(-1, 4, 4).topk(2, dim=-1)[0].sum(-1), 2)[
            1
        ]

    got = rewrite(Router(routed), tokens(5, 32))
    assert got.of(PASS) == [(False, "x is float32 and the weight float32, not bfloat16")]


def test_not_when_the_bfloat16_logits_are_read(rewrite: Any) -> None:
    def both(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        return y.float(), y

    got = rewrite(Router(both), tokens(5, 32))
    assert got.of(PASS) == [(False, "output reads the bfloat16 logits")]


def test_not_a_top_k_of_bfloat16_logits(rewrite: Any) -> None:
    got = rewrite(Router(lambda x, w: torch.topk(F.linear(x, w), 2).values), tokens(5, 32))
    assert got.of(PASS) == [(False, "topk reads the bfloat16 logits")]


def test_not_another_dtype(rewrite: Any) -> None:
    model = Router(SPELLINGS["float"]).half()
    got = rewrite(model, tokens(5, 32).half())
    assert got.of(PASS) == [(False, "x is float16 and the weight float16, not bfloat16")]


def test_not_an_lm_head(rewrite: Any) -> None:
    got = rewrite(Router(SPELLINGS["float"], n=2049), tokens(5, 32))
    assert got.of(PASS) == [(False, "N=2049 is more than 2048: not a router")]


def test_not_a_cast_to_another_dtype(rewrite: Any) -> None:
    got = rewrite(Router(lambda x, w: F.linear(x, w).double()), tokens(5, 32))
    assert got.of(PASS) == []


def test_not_under_autocast(rewrite: Any) -> None:
    def autocast(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return F.linear(x, w).float()

    got = rewrite(Router(autocast), tokens(5, 32))
    assert got.of(PASS) == [(False, "it is inside an autocast region")]


def test_not_when_a_gradient_is_needed(rewrite: Any) -> None:
    got = rewrite(Router(SPELLINGS["float"]), tokens(5, 32), grad=True)
    assert got.of(PASS) == [(False, "it needs a gradient")]


def test_no_grad_inside_a_training_graph(rewrite: Any) -> None:
    def routed(x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            logits = F.linear(x, w).float()
        return logits, F.linear(x, w).float()

    got = rewrite(Router(routed), tokens(5, 32), grad=True, tolerance=LOGITS)
    assert got.of(PASS) == [(True, "logits stay in float32"), (False, "it needs a gradient")]
