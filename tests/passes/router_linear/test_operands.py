"""Routers that the model computes in float32: they stay so, unless compile_ext.bf16_router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from router_model import IN_FLOAT32, PASS, Router, tokens
from torch import Tensor, nn

# The constants of a model that is one router are more than 1/8 of its weights.
FLOAT32: dict[str, Any] = {"options": {"compile_ext.memory_budget": 2**20}}
BF16: dict[str, Any] = {"options": {**FLOAT32["options"], "compile_ext.bf16_router": True}}
# 32 products of |x| up to 4 and |w| up to 1, in another order: 32 roundings of 2^-24 of 128.
SUM = 32 * 128 * 2.0**-24
# x and w rounded to bfloat16 (2^-9 each) in 32 products of up to 4.
ROUNDED = 32 * 4 * 2 * 2.0**-9


def routed(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.float(), w.float()).sigmoid().topk(2)[0]


def test_float32_stays_float32(rewrite: Any) -> None:
    """DeepSeek-V3, GLM-4: the float32 copy of x is exact, so the op reads x itself."""
    got = rewrite(Router(routed), tokens(5, 32), tolerance=SUM, **FLOAT32)
    assert got.of(PASS) == [IN_FLOAT32]
    assert_expected_inline(
        got.graph,
        """\
arg1: bfloat16[5, 32]
arg2: float32[16, 32] = float
%0: float32[5, 16] = compile_ext::router_gemm(arg1, arg2, None)
%1: float32[5, 16] = .sigmoid(%0)
%2 = .topk(%1, 2)
%3: float32[5, 2] = getitem(%2, 0)
return [%3]""",
    )


def test_bfloat16_parameters_with_the_option(rewrite: Any) -> None:
    got = rewrite(Router(routed), tokens(5, 32), tolerance=SUM, **BF16)
    assert got.of(PASS) == [
        (True, "logits stay in float32; the weight as the bfloat16 that it was")
    ]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[16, 32]
arg1: bfloat16[5, 32]
%0: float32[5, 16] = compile_ext::router_gemm(arg1, arg0, None)
%1: float32[5, 16] = .sigmoid(%0)
%2 = .topk(%1, 2)
%3: float32[5, 2] = getitem(%2, 0)
return [%3]""",
    )


def test_a_float32_parameter_with_the_option(rewrite: Any) -> None:
    model = Router(routed, dtype=torch.float32)
    got = rewrite(model, tokens(5, 32), tolerance=ROUNDED, **BF16)
    assert got.of(PASS) == [(True, "logits stay in float32; the weight rounded to bfloat16 once")]
    assert_expected_inline(
        got.graph,
        """\
arg1: bfloat16[5, 32]
arg2: bfloat16[16, 32] = to
%0: float32[5, 16] = compile_ext::router_gemm(arg1, arg2, None)
%1: float32[5, 16] = .sigmoid(%0)
%2 = .topk(%1, 2)
%3: float32[5, 2] = getitem(%2, 0)
return [%3]""",
    )


def test_a_float32_model_with_the_option(rewrite: Any) -> None:
    model = Router(lambda x, w: F.linear(x, w).topk(2)[0], dtype=torch.float32)
    got = rewrite(model, torch.randn(5, 32), tolerance=ROUNDED, **BF16)
    note = "the weight rounded to bfloat16 once, x rounded to it"
    assert got.of(PASS) == [(True, f"logits stay in float32; {note}")]
    assert "bfloat16[5, 32] = .to(" in got.graph


def test_a_rounded_weight_follows_updates() -> None:
    model, x = Router(routed, dtype=torch.float32), tokens(5, 32)
    options = {"compile_ext.inner": "eager", "compile_ext.bf16_router": True}
    compiled = torch.compile(model, backend="compile_ext", options=options)
    with torch.no_grad():
        compiled(x)
        model.w.mul_(-2)
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=ROUNDED)


VIEWS = {
    "view before": lambda x, w: F.linear(x.view(-1, 32).float(), w.float()),
    "view behind": lambda x, w: F.linear(x.float().view(-1, 32), w.float()),
    "views": lambda x, w: F.linear(x.type(torch.float32)[0].reshape(-1, 32), w.float()),
    "product": lambda x, w: x.float().view(-1, 32) @ w.float().t(),
}


@pytest.mark.parametrize("options", [FLOAT32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("body", VIEWS.values(), ids=VIEWS)
def test_casts_behind_views(rewrite: Any, body: Any, options: Any) -> None:
    model = Router(lambda x, w: body(x, w).topk(2)[0])
    got = rewrite(model, tokens(1, 5, 32), tolerance=SUM, **options)
    assert [fired for fired, _ in got.of(PASS)] == [True]
    # x as it is; w as the constant or the parameter.
    assert "float(" not in got.graph
    assert ".type(" not in got.graph
    assert ("bfloat16[16, 32]" in got.graph) == (options is BF16)


def test_a_cast_that_is_written_later_is_no_copy(rewrite: Any) -> None:
    def written(x: Tensor, w: Tensor) -> Any:
        h = x + 1
        wide = h.float()
        h.zero_()
        return F.linear(wide, w.float()).topk(2)[0], h

    got = rewrite(Router(written), tokens(5, 32), tolerance=SUM)
    assert got.of(PASS) == [IN_FLOAT32]
    assert "router_gemm(%1, " in got.graph  # wide


def test_a_cast_that_is_written_itself_is_no_copy(rewrite: Any) -> None:
    def written(x: Tensor, w: Tensor) -> Any:
        wide = x.float()
        wide.mul_(1.001)  # the jitter of some routers
        return F.linear(wide, w.float()).topk(2)[0]

    got = rewrite(Router(written), tokens(5, 32), tolerance=SUM)
    assert got.of(PASS) == [IN_FLOAT32]
    assert "router_gemm(%0, " in got.graph


@pytest.mark.parametrize("options", [FLOAT32, BF16], ids=["float32", "bfloat16"])
def test_an_activation_of_float16(rewrite: Any, options: Any) -> None:
    model = Router(routed, dtype=torch.float32)
    tolerance = ROUNDED if options is BF16 else SUM
    got = rewrite(model, torch.randn(5, 32).half(), tolerance=tolerance, **options)
    assert [fired for fired, _ in got.of(PASS)] == [True]
    assert ".float(" in got.graph
    assert (".to(" in got.graph) == (options is BF16)


def test_weights_that_stay_float32_with_the_option(rewrite: Any) -> None:
    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.computed = nn.Parameter(torch.randn(16, 32))
            self.merged = nn.Parameter(torch.randn(16, 32))

        def forward(self, x: Tensor, delta: Tensor) -> Any:
            computed = F.linear(x.float(), F.normalize(self.computed)).topk(2)[0]
            return computed, F.linear(x.float(), self.merged + delta).topk(2)[0]

    got = rewrite(Gates(), tokens(5, 32), torch.randn(16, 32), tolerance=4 * SUM, **BF16)
    reasons = ("it is a derived constant", "it is not computed from parameters alone")
    said = [f"logits stay in float32; the weight stays float32: {x}" for x in reasons]
    assert got.of(PASS) == [(True, x) for x in said]
    assert ".to(" not in got.graph


def test_a_cast_that_converts_nothing(rewrite: Any) -> None:
    """DeepSeek-V3's parameter is float32 where the checkpoint was not rounded."""
    got = rewrite(Router(routed, dtype=torch.float32), torch.randn(5, 32), tolerance=SUM)
    assert "router_gemm(arg1, arg0, None)" in got.graph
    assert "float(" not in got.graph


def test_a_budget_of_nothing(rewrite: Any) -> None:
    options = {"compile_ext.memory_budget": 0, "compile_ext.bf16_router": True}
    got = rewrite(
        Router(routed, dtype=torch.float32), tokens(5, 32), tolerance=SUM, options=options
    )
    [(fired, detail)] = got.of(PASS)
    assert fired
    assert detail.startswith("logits stay in float32; the weight stays float32: ")
    assert "memory" in detail
    # A copy that the graph makes of a bfloat16 parameter is not needed at all.
    got = rewrite(Router(routed), tokens(5, 32), tolerance=SUM, options=options)
    assert "router_gemm(arg1, arg0, None)" in got.graph
