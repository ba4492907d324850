"""What lower_router_linear leaves alone, and what it says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from router_model import IN_FLOAT32, LOGITS, PASS, Router, tokens
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import compile_ext


def routed(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).float()


# ---- no candidates: nothing is said of them ------------------------------------------------------
def norm(x: Tensor, w: Tensor) -> Tensor:
    """DeepSeek's q_a_proj: the RMSNorm behind it casts to float32."""
    y = F.linear(x, w).float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))).bfloat16()


NO_ROUTERS = {
    "ordinary": F.linear,
    "ordinary product": lambda x, w: x @ w.t(),
    "norm behind": norm,
    "residual stream in float32": lambda x, w: (
        x.float() + F.linear(x, w[:1].expand(32, 32)).float()
    ),
    "float32 linear that is handed out": lambda x, w: F.linear(x.float(), w.float()).float(),
    "cast to float64": lambda x, w: F.linear(x, w).double(),
    "several contracted": lambda x, w: torch.einsum("td,ed->e", x, w).float(),
    "addmm with a factor": lambda x, w: torch.addmm(w[0, :16], x, w.t(), alpha=2).float(),
    "addmm with a matrix": lambda x, w: torch.addmm(w[:5, :16], x, w.t()).float(),
}


@pytest.mark.parametrize("body", NO_ROUTERS.values(), ids=NO_ROUTERS)
def test_no_candidate(rewrite: Any, body: Any) -> None:
    got = rewrite(Router(body), tokens(5, 32), tolerance=2 * LOGITS)
    assert got.of(PASS) == []
    assert "router_gemm" not in got.graph


def test_not_the_softmax_of_a_float32_model(rewrite: Any) -> None:
    """A classifier: nothing is narrower than float32, and nothing is chosen."""
    model = Router(lambda x, w: F.linear(x, w).softmax(-1), dtype=torch.float32)
    assert rewrite(model, torch.randn(5, 32)).of(PASS) == []


REPEATED: dict[str, tuple[Any, list[int], list[int]]] = {
    "columns by the bias": (lambda x, w, b: (x @ w.t() + b).float(), [1, 32], [16]),
    "K of the weight": (lambda x, w, b: torch.einsum("td,ed->te", x, w).float(), [16, 1], [16]),
    "K of x": (lambda x, w, b: torch.einsum("td,ed->te", x[:, :1], w).float(), [16, 32], [16]),
}


@pytest.mark.parametrize("case", REPEATED)
def test_not_what_torch_repeats_to_fit(rewrite: Any, case: str) -> None:
    """The op would refuse the shapes. A bias that repeats the columns of the product stays behind
    it."""
    body, weight, bias = REPEATED[case]
    model = Router(body, *weight, bias=True)
    model.bias = nn.Parameter(torch.randn(bias).bfloat16())
    got = rewrite(model, tokens(5, 32), tolerance=2 * LOGITS)
    assert [fired for fired, _ in got.of(PASS)] == [True] * (case == "columns by the bias")


def test_not_with_an_out_buffer(rewrite: Any) -> None:
    def into(x: Tensor, w: Tensor) -> Tensor:
        out = x.new_empty(5, 16)
        torch.mm(x, w.t(), out=out)
        return out

    model = Router(into)
    compile_ext.mark_router(model)
    got = rewrite(model, tokens(5, 32))
    reason = "it is marked as a router, and read by mm, in no form of a linear that is known"
    assert got.of(PASS) == [(False, reason)]


def test_a_permute_that_swaps_nothing(rewrite: Any) -> None:
    model = Router(lambda x, w: (x @ w.permute(0, 1)).float(), n=32)
    got = rewrite(model, tokens(5, 32), tolerance=2 * LOGITS)
    assert ".t(" in got.graph  # the weight is [k, n]


# ---- candidates that are refused -----------------------------------------------------------------
def test_not_another_dtype(rewrite: Any) -> None:
    got = rewrite(Router(routed).half(), tokens(5, 32).half())
    reason = "x is float16 and the weight float16, not bfloat16 or float32"
    assert got.of(PASS) == [(False, reason)]


@pytest.mark.parametrize("body", [routed, lambda x, w: (x @ w.t()).float()], ids=["linear", "@"])
def test_not_an_lm_head(rewrite: Any, body: Any) -> None:
    got = rewrite(Router(body, n=2049), tokens(5, 32))
    assert got.of(PASS) == [(False, "N=2049 is more than 2048: not a router")]


def test_as_wide_as_a_router_may_be(rewrite: Any) -> None:
    got = rewrite(Router(routed, n=2048), tokens(5, 32), tolerance=2 * LOGITS)
    assert got.of(PASS) == [IN_FLOAT32]


def test_not_a_product_of_two_activations(rewrite: Any) -> None:
    def nearest(x: Tensor, keys: Tensor) -> Tensor:
        return (x @ keys.t()).float().topk(2)[0]

    got = rewrite(nearest, tokens(5, 32), tokens(7, 32))
    reason = "a product with what is no parameter or buffer: not a router"
    assert got.of(PASS) == [(False, reason)]


def test_not_attention(rewrite: Any) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2), -1, dtype=torch.float32).bfloat16() @ v

    got = rewrite(attention, *(tokens(2, 5, 32) for _ in range(3)))
    assert got.of(PASS) == []


def test_not_a_tensor_subclass(rewrite: Any) -> None:
    model = Router(routed)
    model.w = nn.Parameter(TwoTensor(model.w.detach(), model.w.detach()), requires_grad=False)
    with torch.no_grad():
        options: dict[str, Any] = {"compile_ext.inner": "eager"}
        torch.compile(model, backend="compile_ext", options=options)(tokens(5, 32))
    [row] = compile_ext.explain(model).rows
    [decision] = row.decisions
    assert decision.detail == "the weight is a tensor subclass (TwoTensor)"


def test_not_under_autocast(rewrite: Any) -> None:
    def autocast(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return F.linear(x, w).float()

    got = rewrite(Router(autocast), tokens(5, 32))
    assert got.of(PASS) == [(False, "it is inside an autocast region")]


def test_not_a_product_under_autocast_with_the_bias_outside(rewrite: Any) -> None:
    def autocast(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            y = x @ w.t()
        return (y + bias).topk(2)[0]

    got = rewrite(Router(autocast, bias=True), tokens(5, 32))
    assert got.of(PASS) == [(False, "it is inside an autocast region")]


def test_not_when_a_gradient_is_needed(rewrite: Any) -> None:
    got = rewrite(Router(routed), tokens(5, 32), grad=True)
    assert got.of(PASS) == [(False, "it needs a gradient")]


def test_no_grad_inside_a_training_graph(rewrite: Any) -> None:
    def both(x: Tensor, w: Tensor) -> Any:
        with torch.no_grad():
            logits = F.linear(x, w).float()
        return logits, F.linear(x, w).float()

    got = rewrite(Router(both), tokens(5, 32), grad=True, tolerance=LOGITS)
    assert got.of(PASS) == [IN_FLOAT32, (False, "it needs a gradient")]


# ---- what stays outside of the op ----------------------------------------------------------------
BIASES = {  # eager broadcasts them, or takes them in another dtype
    "float64": (torch.randn(16).double(), lambda x, w, b: x @ w.t() + b),
    "integers": (torch.arange(16), lambda x, w, b: b + x @ w.t()),
    "a matrix": (torch.randn(5, 16).bfloat16(), lambda x, w, b: x @ w.t() + b),
    "a number": (torch.randn(1).bfloat16(), lambda x, w, b: F.linear(x, w) + b),
    "scaled": (torch.randn(16).bfloat16(), lambda x, w, b: torch.add(x @ w.t(), b, alpha=2)),
}


@pytest.mark.parametrize(("bias", "body"), BIASES.values(), ids=BIASES)
def test_a_bias_that_the_op_does_not_take(rewrite: Any, bias: Tensor, body: Any) -> None:
    model = Router(lambda x, w, b: body(x, w, b).topk(2)[0], bias=True)
    model.bias = nn.Parameter(bias, requires_grad=False)
    got = rewrite(model, tokens(5, 32), tolerance=4 * LOGITS)  # below 32
    assert [fired for fired, _ in got.of(PASS)] == [True]
    assert "arg1, None)" in got.graph or "arg0, None)" in got.graph
    assert "bfloat16[5, 16] = .to(" in got.graph


@pytest.mark.parametrize("bias", [torch.randn(1), torch.randn(5, 16)], ids=["one", "matrix"])
def test_not_with_a_bias_that_is_broadcast(rewrite: Any, bias: Tensor) -> None:
    model = Router(lambda x, w, b: F.linear(x, w, b).float(), bias=True)
    model.bias = nn.Parameter(bias.bfloat16(), requires_grad=False)
    assert rewrite(model, tokens(5, 32)).of(PASS) == []


def test_bits_of_the_logits(rewrite: Any) -> None:
    """A view with another dtype is no view of the numbers."""

    def both(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        return y.topk(2)[0], y.view(torch.int16).float() > 0

    model = Router(both)
    got = rewrite(model, tokens(5, 32), tolerance=LOGITS)
    assert got.of(PASS) == [(True, "logits in float32, bfloat16 for topk, view")]


def test_a_bias_for_the_choice_alone(rewrite: Any) -> None:
    """Both the logits and their sum are read: the bias stays outside of the op."""

    def chosen(x: Tensor, w: Tensor, bias: Tensor) -> Any:
        y = x @ w.t()
        return (y + bias).topk(2)[1], y.float()

    got = rewrite(Router(chosen, bias=True), tokens(5, 32), tolerance=LOGITS)
    assert "compile_ext::router_gemm(arg2, arg1, None)" in got.graph


def test_a_bias_behind_a_write(rewrite: Any) -> None:
    """The op stands where the sum stands: x has changed by then."""

    def written(x: Tensor, w: Tensor, bias: Tensor) -> Any:
        h = x + 1
        y = h @ w.t()
        h.mul_(3)
        return (y + bias).float(), h

    got = rewrite(Router(written, bias=True), tokens(5, 32), tolerance=4 * LOGITS)
    assert "compile_ext::router_gemm" in got.graph
    assert "None)" in got.graph
