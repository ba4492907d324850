"""router_gemm and router_gemm_m1 against a float64 oracle, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_ext.ops import float32_matmul, router_gemm, router_gemm_aten, router_gemm_m1
from compile_ext.ops.errors import DeviceError, DtypeError, GradError, RankError, ShapeError

OPS = [router_gemm, router_gemm_m1]
BF16, F32 = torch.bfloat16, torch.float32
DTYPES = [(BF16, BF16), (BF16, F32), (F32, BF16), (F32, F32)]  # of a and b
OVERLOADS = {
    router_gemm: torch.ops.compile_ext.router_gemm.default,
    router_gemm_m1: torch.ops.compile_ext.router_gemm_m1.default,
}
SHAPES = [  # leading dimensions of a, n, k
    ((), 5, 64),
    ((0,), 5, 16),
    ((1,), 1, 1),
    ((1,), 128, 300),
    ((3,), 7, 1),
    ((17,), 1, 33),
    ((33,), 129, 257),
    ((2, 3), 8, 65),
    ((0, 4), 8, 65),
    ((2, 1, 5), 3, 40),
]
M1_LEADS = [(), (1,), (1, 1), (1, 1, 1)]


def shape_id(value: Any) -> str:
    return "x".join(map(str, value)) or "scalar" if isinstance(value, tuple) else str(value)


def name_of(value: Any) -> str:
    return value.__name__


def operands(
    lead: tuple[int, ...], n: int, k: int, a_dtype: torch.dtype = BF16, b_dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor]:
    return torch.randn(*lead, k).to(a_dtype), torch.randn(n, k).to(b_dtype)


def oracle(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.einsum("...k,nk->...n", a.double(), b.double())
    return product if bias is None else product + bias.double()


def magnitude(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return oracle(a.abs(), b.abs(), None if bias is None else bias.abs())


@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(("a_dtype", "b_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize(("lead", "n", "k"), SHAPES, ids=shape_id)
def test_equals_the_formula_in_float32(lead, n, k, a_dtype, b_dtype, with_bias, assert_gemm_close):
    a, b = operands(lead, n, k, a_dtype, b_dtype)
    bias = torch.randn(n) if with_bias else None
    out = router_gemm(a, b, bias)
    assert out.dtype == torch.float32  # the bound then shows any rounding to bf16 on the way
    assert_gemm_close(out, oracle(a, b, bias), magnitude(a, b, bias), k)
    by_row = OVERLOADS[router_gemm](a, b, bias, pinned="batch_invariant")
    assert_gemm_close(by_row, oracle(a, b, bias), magnitude(a, b, bias), k)


@pytest.mark.parametrize("with_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (128, 300), (7, 1), (1, 33)], ids=shape_id)
@pytest.mark.parametrize(("a_dtype", "b_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("lead", M1_LEADS, ids=shape_id)
def test_m1_equals_the_formula_and_router_gemm(
    lead, n, k, a_dtype, b_dtype, with_bias, assert_gemm_close
):
    a, b = operands(lead, n, k, a_dtype, b_dtype)
    bias = torch.randn(n) if with_bias else None
    out = router_gemm_m1(a, b, bias)
    assert out.dtype == torch.float32
    assert_gemm_close(out, oracle(a, b, bias), magnitude(a, b, bias), k)
    # The pass swaps one for the other: on the CPU, not a bit may differ.
    assert torch.equal(out, router_gemm(a, b, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_bias_dtypes(op, dtype, assert_gemm_close):
    args = (*operands((1,), 9, 20), torch.randn(9).to(dtype))
    assert_gemm_close(op(*args), oracle(*args), magnitude(*args), 20)


def strided_cases() -> dict[str, tuple[Tensor, Tensor]]:
    a, b = torch.randn(6, 10, 80).bfloat16(), torch.randn(40, 40).bfloat16()
    return {
        "columns_of_wider": (a[0, :, 3:43], b),
        "every_second_column": (a[0, :, ::2], b),
        "transposed": (a[0, :, :40].T.contiguous().T, b.T),
        "leading_swapped": (a[..., :40].transpose(0, 1), b),
        "k_first": (a[..., :40].permute(2, 0, 1).contiguous().permute(1, 2, 0), b[::2]),
        "expanded": (a[:1, :, :40].expand(6, 10, 40), b[:1].expand(3, 40)),
    }


@pytest.mark.parametrize("case", list(strided_cases()))
def test_any_strides(case, assert_gemm_close):
    args = (*strided_cases()[case], None)
    assert_gemm_close(router_gemm(*args), oracle(*args), magnitude(*args), 40)


def test_m1_takes_any_strides(assert_gemm_close):
    args = (torch.randn(40, 7).bfloat16()[:, 2:3].T, torch.randn(40, 9).bfloat16().T, None)
    assert_gemm_close(router_gemm_m1(*args), oracle(*args), magnitude(*args), 40)


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_logits_that_bf16_would_merge_stay_apart(op):
    # 256 + 1/256 and 256 - 1/256 are one number in bf16: the router would lose the order.
    a = torch.tensor([[256.0, 1.0]]).bfloat16()
    b = torch.tensor([[1.0, 2.0**-8], [1.0, -(2.0**-8)]]).bfloat16()
    assert op(a, b).tolist() == [[256 + 2.0**-8, 256 - 2.0**-8]]


@pytest.fixture(params=["highest", "high", "medium"])
def matmul_precision(request):
    """What torch may do to float32 operands: nothing, round to TF32, round to bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("a_dtype", "b_dtype"), DTYPES[1:], ids=str)
@pytest.mark.parametrize("kernel", [None, "batch_invariant"], ids=str)
@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_float32_operands_are_never_rounded(op, kernel, a_dtype, b_dtype, matmul_precision):
    a, b = torch.eye(1, 64).to(a_dtype), torch.ones(32, 64).to(b_dtype)
    (a if a_dtype == F32 else b).mul_(1 + 2.0**-20)  # 1 in TF32 and in bfloat16
    assert OVERLOADS[op](a, b, None, pinned=kernel).tolist() == [[1 + 2.0**-20] * 32]


@pytest.mark.parametrize(("device", "backend"), [("cuda", "cuda"), ("cpu", "mkldnn")])
@pytest.mark.parametrize(("a_dtype", "b_dtype"), DTYPES, ids=str)
def test_why_float32_would_be_rounded(a_dtype, b_dtype, device, backend, matmul_precision):
    with FakeTensorMode():
        a = torch.empty(1, 64, device=device, dtype=a_dtype)
        b = torch.empty(8, 64, device=device, dtype=b_dtype)
        reason = float32_matmul.why_rounded(a, b)
        if device == "cuda":  # cuBLAS stands back
            assert router_gemm_aten.why_not(a, b, None) == reason
    precision = "bf16" if (device, matmul_precision) == ("cpu", "medium") else "tf32"
    text = f"torch multiplies float32 in {precision} (torch.backends.{backend}.matmul)"
    is_rounded = matmul_precision != "highest" and F32 in (a_dtype, b_dtype)
    assert reason == (text if is_rounded else None)


def test_the_reference_takes_float64_where_float32_would_be_rounded(monkeypatch):
    a, b = torch.tensor([[2.0**30, 1, -(2.0**30)]]), torch.ones(1, 3)
    assert router_gemm(a, b).tolist() == [[0]]  # float32 has no 2^30 + 1
    monkeypatch.setattr(float32_matmul, "why_rounded", lambda a, b: "it would be")
    assert router_gemm(a, b).tolist() == [[1]]
    assert router_gemm(a, b).dtype == F32


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_subnormal_and_large_operands(op):
    tiny, large = torch.finfo(torch.bfloat16).tiny / 4, 2.0**100
    a = torch.tensor([[tiny, 0.0]]).bfloat16()
    b = torch.tensor([[large, 1.0], [1.0, large]]).bfloat16()
    assert op(a, b).tolist() == [[tiny * large, tiny]]


def test_zero_row_gives_the_bias_and_nan_stays_in_its_row():
    a, b = operands((3,), 8, 33)
    a[0], a[2, 5] = 0, torch.nan
    bias = torch.randn(8)
    out = router_gemm(a, b, bias)
    assert torch.equal(out[0], bias)
    assert out.isnan().all(dim=1).tolist() == [False, False, True]
    assert not out[:2].isnan().any()


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_no_grad_and_inference_mode_take_parameters(op):
    a, b = operands((1,), 4, 8)
    want = op(a, b)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(op(a, b.requires_grad_()), want)


@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("op", "lead"),
    [
        *((router_gemm, lead) for lead in [(), (0,), (1,), (5,), (2, 3)]),
        *((router_gemm_m1, lead) for lead in M1_LEADS[:3]),
    ],
    ids=lambda x: x.__name__ if callable(x) else shape_id(x),
)
def test_opcheck(op, lead, bias_dtype, opcheck):
    a, b = operands(lead, 7, 36)
    bias = None if bias_dtype is None else torch.randn(7).to(bias_dtype)
    for x in (a, torch.randn(36, *lead).bfloat16().movedim(0, -1)):
        opcheck(OVERLOADS[op], (x, b, bias))


def valid() -> dict[str, Any]:
    return {
        "a": torch.ones(1, 32).bfloat16(),
        "b": torch.ones(6, 32).bfloat16(),
        "bias": torch.ones(6),
    }


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "a_fp16": (
        "a", torch.ones(1, 32).half(), DtypeError, "a of float16", "bfloat16 or float32"),
    "b_fp8": (
        "b", torch.ones(6, 32).to(torch.float8_e4m3fn), DtypeError, "float8",
        "bfloat16 or float32"),
    "bias_int": ("bias", torch.ones(6).int(), DtypeError, "bias of int32", "bfloat16 or float16"),
    "a_scalar": (
        "a", torch.tensor(1.0).bfloat16(), RankError, "a of shape []", "at least 1 dimension",
        "as [..., k]"),
    "b_rank_1": ("b", torch.ones(32).bfloat16(), RankError, "b of shape [32]", "2 dimensions"),
    "b_rank_3": ("b", torch.ones(1, 6, 32).bfloat16(), RankError, "[1, 6, 32]", "2 dimensions"),
    "b_transposed": (
        "b", torch.ones(32, 6).bfloat16(), ShapeError, "a [1, 32] and b [32, 6]", "b [n, k]",
        "pass it untransposed"),
    "bias_of_k": ("bias", torch.ones(32), ShapeError, "bias of shape [32]", "[6]"),
    "b_meta": (
        "b", torch.ones(6, 32, device="meta").bfloat16(), DeviceError, "b on meta", "one device"),
    "bias_meta": ("bias", torch.ones(6, device="meta"), DeviceError, "bias on meta", "one device"),
    "a_grad": (
        "a", torch.ones(1, 32).bfloat16().requires_grad_(), GradError, "a that", "gradient"),
    "b_grad": (
        "b", torch.ones(6, 32).bfloat16().requires_grad_(), GradError, "b that", "gradient"),
}  # fmt: skip
BAD_M1 = {
    f"m_is_{shape_id(lead)}": (
        "a", torch.ones(*lead, 32).bfloat16(), ShapeError, f"a of shape {[*lead, 32]}",
        "one token", "call router_gemm")
    for lead in [(0,), (2,), (1, 3), (1, 0)]
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_refuses(op, case, assert_refused):
    assert_refused(op, valid(), BAD[case])


@pytest.mark.parametrize("case", BAD_M1)
def test_m1_refuses_another_m(case, assert_refused):
    assert_refused(router_gemm_m1, valid(), BAD_M1[case])


@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_the_valid_call_of_the_refusals_is_valid(op):
    assert torch.equal(op(**valid()), torch.full((1, 6), 33.0))
