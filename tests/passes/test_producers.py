"""Where ``quantize_activations`` fires: what fuses with a quantization, and how many tokens there
are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

PASS = "quantize_activations"
K = 256
FIRED = (True, "its activation is quantized")
SHARED = (True, "it shares the quantization of its activation")
NORM = "compile_ext::rms_norm_quantize_fp8("

pytestmark = pytest.mark.usefixtures("gemm_kernel", "norm_kernel")


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def times_ones(x: Tensor) -> Tensor:
    return x @ torch.ones(x.shape[1], K).bfloat16()


def attention(x: Tensor) -> Tensor:
    x = x[None, None]
    return F.scaled_dot_product_attention(x, x, x)[0, 0]


def embedding(model: Any, x: Tensor) -> Tensor:
    return F.embedding(x[:, 0].long().clamp(0, 7), model.router)


def norm_in_float32(model: Any, x: Tensor) -> Tensor:
    return (F.rms_norm(x.float(), (K,)) * model.w.float()).bfloat16()


def norm_of_another_formula(model: Any, x: Tensor) -> Tensor:
    return x / (x.float().norm(dim=-1, keepdim=True) + 1e-6).bfloat16()


# What computes the activation, and what it is quantized in: None for a kernel of its own.
PRODUCERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str | None]] = {
    "silu and mul": (lambda model, x: F.silu(x) * x, "pointwise"),
    "a cast": (lambda model, x: times_ones(x.float().bfloat16()).float().bfloat16(), "pointwise"),
    "a gate on a GEMM": (lambda model, x: x.sigmoid() * times_ones(x), "pointwise"),
    "a residual": (lambda model, x: x + model.up(x)[:, :K], "pointwise"),
    "an embedding": (embedding, "pointwise"),
    "a copy": (lambda model, x: x.t().contiguous().t().contiguous(), "pointwise"),
    "an RMSNorm": (lambda model, x: model.norm(x), NORM),
    "an RMSNorm in float32": (norm_in_float32, NORM),
    "an input": (lambda model, x: x, None),
    "a GEMM": (lambda model, x: times_ones(x), None),
    "attention": (lambda model, x: attention(x), None),
    "half of a GEMM": (lambda model, x: model.up(x).chunk(2, -1)[0], None),
    "a softmax": (lambda model, x: x.softmax(-1), None),
    "a LayerNorm": (lambda model, x: F.layer_norm(x, (K,)), None),
    "pointwise behind a norm": (lambda model, x: F.silu(model.norm(x)), None),
    "pointwise behind a softmax": (lambda model, x: x.softmax(-1) * 2, None),
    "pointwise behind a LayerNorm": (lambda model, x: F.layer_norm(x, (K,)) * 2, None),
    "a sum": (lambda model, x: x.unflatten(1, (2, -1)).repeat(1, 1, 2).sum(1), None),
    "an RMSNorm of another formula": (norm_of_another_formula, None),
}


@pytest.mark.parametrize("case", PRODUCERS)
def test_few_tokens_are_quantized_where_that_fuses(rewrite: Any, fp8_model: Any, case: str) -> None:
    produce, fuses = PRODUCERS[case]
    got = rewrite(fp8_model(lambda model, x: model.down(produce(model, x))), tokens(5, K))
    fired, reason = got.of(PASS)[-1]  # that of model.down
    assert fired is (fuses is not None)
    if not fired:
        assert reason.startswith("M is 5: the kernel quantizes ")
        assert reason.endswith(" on its way, and another one computes it")
    assert (NORM in got.graph) is (fuses == NORM)
    assert ("column_major(" in got.graph) is (fuses == "pointwise")


@pytest.mark.parametrize("case", PRODUCERS)
def test_many_tokens_are_quantized_whatever_computes_them(
    rewrite: Any, fp8_model: Any, case: str
) -> None:
    produce, fuses = PRODUCERS[case]
    model = fp8_model(lambda model, x: model.down(produce(model, x)))
    got = rewrite(model, tokens(17, K))
    assert set(got.of(PASS)) == {FIRED}
    assert (NORM in got.graph) is (fuses == NORM)


@pytest.mark.parametrize(
    ("limits", "fires"),
    [({}, True), ({"min": 2, "max": 16}, False), ({"min": 2, "max": 17}, True)],
    ids=str,
)
def test_dynamic_m_decides_by_its_largest(
    rewrite: Any, fp8_model: Any, limits: dict[str, int], fires: bool
) -> None:
    x = tokens(5, K)
    torch._dynamo.mark_dynamic(x, 0, **limits)
    got = rewrite(fp8_model(lambda model, x: model.down(x)), x)
    ((fired, reason),) = got.of(PASS)
    assert fired is fires
    assert fires or reason.startswith("M is 2..16: ")


def test_an_activation_that_a_router_reads_too(rewrite: Any, fp8_model: Any) -> None:
    def body(model: Any, x: Tensor) -> Any:
        y = model.norm(x)
        return model.up(y), model.down(y), F.linear(y, model.router)

    rewrite(fp8_model(body), tokens(5, K))
    got = rewrite(fp8_model(body), tokens(64, K))  # the fixture's record holds both
    assert [fired for fired, _ in got.of(PASS)[:2]] == [False, False]
    assert got.of(PASS)[2:] == [FIRED, SHARED]
