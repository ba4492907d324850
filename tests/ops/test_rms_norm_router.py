"""rms_norm_router and rms_norm_router_topk: float64, the ops that they stand for, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_ext.ops import (
    add_rms_norm,
    define,
    device_tables,
    rms_norm,
    rms_norm_router,
    rms_norm_router_topk,
    router_gemm,
    router_topk,
)
from compile_ext.ops.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    GradError,
    RankError,
    ShapeError,
)

OPS = torch.ops.compile_ext
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
BF16, EPS = torch.bfloat16, 1e-6
CHOICE: dict[str, Any] = {"top_k": 3, "scores": "sigmoid", "groups": 4, "top_groups": 2}


def operands(k: int, n: int, dtype: torch.dtype = BF16, b_dtype: torch.dtype = BF16) -> Any:
    x, residual = torch.randn(1, k).to(dtype), (torch.randn(1, k) * 2).to(dtype)
    weight = (torch.randn(k) + 2).to(dtype)
    return x, residual, weight, torch.randn(n, k).to(b_dtype), torch.randn(n)


def exact(row: Tensor, weight: Tensor | None, b: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """The logits of a row in float64, and the sum of their magnitudes."""
    x = row.double()
    normed = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    normed = normed if weight is None else normed * weight.double()
    added: Any = 0.0 if bias is None else bias.double()
    return normed @ b.double().t() + added, normed.abs() @ b.double().abs().t() + abs(added)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("b_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (129, 7), (2880, 128)], ids=str)
@pytest.mark.parametrize("round_before_weight", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_against_float64(
    dtype: Any, b_dtype: Any, shape: Any, round_before_weight: bool, adds: bool
) -> None:
    k, n = shape
    x, residual, weight, b, bias = operands(k, n, dtype, b_dtype)
    kept = [t.clone() for t in (x, residual)]
    norm: dict[str, Any] = {
        "weight": weight,
        "eps": EPS,
        "round_before_weight": round_before_weight,
    }
    y, total, logits = rms_norm_router(x, b, bias, residual=residual if adds else None, **norm)
    if adds:
        want, want_total = add_rms_norm(x, residual, **norm)
        assert torch.equal(total, want_total)
    else:
        want = rms_norm(x, **norm)
        assert (total.shape, total.dtype) == ((0,), dtype)
    assert torch.equal(y, want)
    row, magnitudes = exact(total if adds else x, weight, b, bias)
    assert logits.dtype == torch.float32
    # k products and sums in float32, in any order, of a norm that is good to 2^-20.
    bound = (k * 2.0**-24 + 2.0**-20) * magnitudes
    assert bool(((logits - row).abs() <= bound).all())
    # Of the two ops, the activation is rounded once or twice more, by half of eps each.
    far = (1 + round_before_weight) * torch.finfo(dtype).eps / 2 * magnitudes * (1 + 2.0**-7)
    assert bool(((router_gemm(want.float(), b, bias) - logits).abs() <= far + 2 * bound).all())
    assert [torch.equal(*pair) for pair in zip((x, residual), kept, strict=True)] == [True, True]


def test_the_logits_are_those_of_the_norm_that_is_not_rounded() -> None:
    x, _, weight, b, _ = operands(256, 64)
    for round_before_weight in (False, True):
        y, _, logits = rms_norm_router(
            x, b, weight=weight, eps=EPS, round_before_weight=round_before_weight
        )
        row, magnitudes = exact(x, weight, b, None)
        assert bool(((logits - row).abs() <= 2.0**-20 * magnitudes).all())
        assert bool(((router_gemm(y, b) - row).abs() > 2.0**-20 * magnitudes).any())


def test_without_a_weight_and_a_bias() -> None:
    x, _, _, b, _ = operands(300, 8)
    y, _, logits = rms_norm_router(x, b, eps=EPS)
    assert torch.equal(y, rms_norm(x, None, EPS))
    row, magnitudes = exact(x, None, b, None)
    assert bool(((logits - row).abs() <= 2.0**-19 * magnitudes).all())


def test_any_strides() -> None:
    x, residual, weight, b, bias = operands(64, 8)
    spread = [t.repeat_interleave(2, -1)[..., ::2] for t in (x, residual, weight, b, bias)]
    for give, take in zip(
        rms_norm_router(spread[0], spread[3].t().contiguous().t(), spread[4], residual=spread[1]),
        rms_norm_router(x, b, bias, residual=residual),
        strict=True,
    ):
        assert give.is_contiguous()
        # BLAS sums in another order for another layout.
        torch.testing.assert_close(give, take, rtol=0, atol=64 * 2.0**-20)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("choice", [CHOICE, {"top_k": 1}, {"top_k": 16, "renormalize": False}])
def test_the_choice_is_that_of_the_logits(adds: bool, choice: dict[str, Any]) -> None:
    x, residual, weight, b, bias = operands(96, 16)
    choice_bias = torch.randn(16) / 8 if "groups" in choice else None
    norm = {"residual": residual if adds else None, "weight": weight}
    y, total, logits = rms_norm_router(x, b, bias, **norm)
    want = (y, total, *router_topk(logits, choice_bias, **choice))
    got = rms_norm_router_topk(x, b, bias, choice_bias, **norm, **choice)
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        assert torch.equal(g, w)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_opcheck(dtype: Any, adds: bool, opcheck: Any) -> None:
    x, residual, weight, b, bias = operands(40, 16, dtype)
    for given in (x, x.repeat_interleave(2, -1)[:, ::2]):
        args = given, residual if adds else None, weight, EPS, True, b, bias
        opcheck(OPS.rms_norm_router.default, args)
        more = torch.randn(16), 3, "sigmoid", 4, 2, -math.inf, True, 2.5
        opcheck(OPS.rms_norm_router_topk.default, (*args, *more))


def call(*values: Any) -> Any:
    x, residual, weight, b, bias = values
    return rms_norm_router(x, b, bias, residual=residual, weight=weight)


call.__name__ = "rms_norm_router"


def valid() -> dict[str, Any]:
    names = ("x", "residual", "weight", "b", "bias")
    return dict(zip(names, operands(32, 6), strict=True))


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "two_tokens": (
        "x", torch.ones(2, 32).bfloat16(), ShapeError, "residual of shape [1, 32]", "[2, 32]",
        "residual"),
    "x_int": ("x", torch.ones(1, 32).int(), DtypeError, "x of int32", "bfloat16 or float16"),
    "x_rank_1": ("x", torch.ones(32).bfloat16(), RankError, "x of shape [32]", "2 dimensions"),
    "residual_of_k": (
        "residual", torch.ones(32).bfloat16(), ShapeError, "residual of shape [32]", "[1, 32]"),
    "weight_of_n": ("weight", torch.ones(6), ShapeError, "weight of shape [6]", "[32]"),
    "b_fp16": ("b", torch.ones(6, 32).half(), DtypeError, "b of float16", "bfloat16 or float32"),
    "b_rank_1": ("b", torch.ones(32), RankError, "b of shape [32]", "2 dimensions"),
    "b_transposed": ("b", torch.ones(32, 6), ShapeError, "b of shape [32, 6]", "[32, 32]"),
    "b_meta": ("b", torch.ones(6, 32, device="meta"), DeviceError, "b on meta", "one device"),
    "b_grad": ("b", torch.ones(6, 32).requires_grad_(), GradError, "b that", "gradient"),
    "bias_of_k": ("bias", torch.ones(32), ShapeError, "bias of shape [32]", "[6]"),
    "bias_meta": ("bias", torch.ones(6, device="meta"), DeviceError, "bias on meta", "one device"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str, assert_refused: Any) -> None:
    assert_refused(call, valid(), BAD[case])


@pytest.mark.parametrize("m", [0, 2])
def test_refuses_another_m(m: int, assert_refused: Any) -> None:
    def rms_norm_router_of(x: Tensor) -> Any:
        return rms_norm_router(x, torch.ones(6, 32))

    rms_norm_router_of.__name__ = "rms_norm_router"
    bad = ("x", torch.ones(m, 32), ShapeError, f"x of shape [{m}, 32]", "one token: [1, k]",
           "call rms_norm or add_rms_norm, then router_gemm")  # fmt: skip
    assert_refused(rms_norm_router_of, {"x": torch.ones(1, 32)}, bad)


BAD_CHOICE: list[tuple[Any, ...]] = [
    ("choice_bias", torch.zeros(5), ShapeError, "choice_bias of shape [5]", "[16]"),
    ("choice_bias", torch.zeros(16, device="meta"), DeviceError, "choice_bias on meta", "one"),
    ("top_k", 17, ArgumentError, "top_k = 17, n = 16", "1 to n", "choose 1 to n experts"),
    ("scores", "tanh", ArgumentError, "scores = 'tanh'", "softmax or sigmoid", "name one"),
    ("x", torch.ones(3, 32).bfloat16(), ShapeError, "x of shape [3, 32]", "one token", "call rms"),
]


@pytest.mark.parametrize("bad", BAD_CHOICE, ids=lambda bad: bad[0])
def test_refuses_with_a_choice(bad: tuple[Any, ...], assert_refused: Any) -> None:
    def choose(x: Tensor, choice_bias: Tensor, top_k: int, scores: str) -> Any:
        b = torch.ones(16, 32)
        return rms_norm_router_topk(x, b, None, choice_bias, top_k=top_k, scores=scores)

    choose.__name__ = "rms_norm_router_topk"
    arguments = torch.ones(1, 32).bfloat16(), torch.zeros(16), 2, "softmax"
    names = ("x", "choice_bias", "top_k", "scores")
    assert_refused(choose, dict(zip(names, arguments, strict=True)), bad)


def test_the_valid_calls_of_the_refusals_are_valid() -> None:
    assert call(*valid().values())[2].shape == (1, 6)
    ids = rms_norm_router_topk(torch.ones(1, 32).bfloat16(), torch.ones(16, 32), top_k=2)[3]
    assert ids.tolist() == [[0, 1]]


def test_the_choice_is_in_the_launch_only_where_its_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(device_tables, "ranges_of", lambda index: {})
    definition = define.definition_of(OPS.rms_norm_router_topk.default)
    assert definition is not None
    with FakeTensorMode():
        x, b = torch.empty(1, 64, device="cuda"), torch.empty(16, 64, device="cuda")
    args = x, None, None, 1e-6, False, b, None, None, 4, "softmax", 1, 1, 0.0, True, 1.0
    assert definition.kernel_for(*args)[0].name == "reference"
    assert definition.kernel_for(*args, pinned="triton")[0].name == "triton"
    [triton] = [k for k in definition.kernels if k.name == "triton"]
    reason = triton.why_not(*args[:8], 33, *args[9:])
    assert reason == "takes top_k up to 32, found 33"
