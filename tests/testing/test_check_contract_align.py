"""``align`` and ``m1_variant``: padded, or for one token, the same numbers; true and false ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import Align, Gemm, OpContract, Pad
from compile_ext.testing import check_contract

GEMM = Gemm(a="x", b="w", scale_b="scale", bias="bias")
GEMM_SCHEMA = "gemm(Tensor x, Tensor w, Tensor? scale, Tensor? bias) -> Tensor"


def gemm(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x.float() @ w.float().t()
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def strict(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    if w.shape[0] % 8:
        raise RuntimeError(f"N={w.shape[0]} is no multiple of 8")
    return gemm(x, w, scale, bias)


def operands(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    return torch.randn(m, k), torch.randn(n, k), torch.rand(n) + 0.5, torch.randn(n)


def padding(**changes: Any) -> OpContract:
    n = {"w": 0, "scale": 1.0, "bias": 0, **changes}
    k = {"x": 0, "w": 0}
    return OpContract(gemm=GEMM, align={"n": Align(8, pad=n), "k": Align(8, pad=k)})


@pytest.mark.parametrize(("n", "words"), [(5, "N 5 -> 8"), (8, "N 8 -> 16")])
def test_align_is_proved_for_sizes_that_are_aligned_and_that_are_not(define, n, words):
    op = define(GEMM_SCHEMA, gemm, padding())
    report = check_contract(op, operands(3, n, 12))
    assert report.holds == (
        "clean runs", "align['n']", "align['k']", "align['n', 'k']", "bounds (every op)",
    )  # fmt: skip
    assert report.claims[1].how == f"{words}: same numbers within rounding; the pads are not read"
    assert report.claims[2].how == "K 12 -> 16: same numbers within rounding"
    assert not report.notes


def test_a_pad_that_changes_the_sum(define, assert_false):
    contract = OpContract(gemm=GEMM, align={"k": Align(8, pad={"x": 1.0, "w": 1.0})})
    op = define(GEMM_SCHEMA, gemm, contract)
    found = r"align\['k'\]: K 12 -> 16, x, w padded: result\[0, 0\] is .*, 15 of 15 elements differ"
    assert_false(op, operands(3, 5, 12), found, "within rounding", "pad values or the axes of x, w")


def test_a_pad_that_reaches_the_first_columns(define, assert_false):
    def normalised(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        assert scale is not None
        return gemm(x, w, scale / scale.amax(), bias)

    op = define(GEMM_SCHEMA, normalised, padding(scale=9.0))
    found = r"align\['n'\]: N 5 -> 8, w, scale, bias padded: result\[0, 0\]"
    assert_false(op, operands(3, 5, 12), found, "within rounding")
    # With a value that cannot be the largest, the claim is true, and rests on that value.
    op = define(GEMM_SCHEMA.replace("gemm", "gemm_2"), normalised, padding(scale=0.0))
    how = check_contract(op, operands(3, 5, 12)).claims[1].how
    assert how.endswith("; the kept columns change if the pads of scale hold something else")


def test_an_axis_that_the_op_does_not_take(define, assert_false):
    contract = OpContract(gemm=GEMM, align={"n": Align(8, pad={"w": 0})})  # scale stays as it is
    op = define(GEMM_SCHEMA, gemm, contract)
    found = r"align\['n'\]: N 5 -> 8, w padded: the op raises RuntimeError: The size of tensor"
    assert_false(op, operands(3, 5, 12), found, "the result of the call as it was given")


def test_a_result_that_does_not_grow(define, assert_false):
    def cut(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        return gemm(x, w, scale, bias)[:, :5].clone()

    op = define(GEMM_SCHEMA, cut, padding())
    found = r"align\['n'\]: N 5 -> 8, .* a result of shape \[3, 5\]"
    assert_false(op, operands(3, 5, 12), found, r"\[3, 8\]: 5 columns and the padded ones")


def test_an_op_that_refuses_unaligned_sizes_is_tried_with_aligned_ones(define):
    op = define(GEMM_SCHEMA, strict, padding())
    report = check_contract(op, operands(3, 5, 12))
    assert report.notes == (
        "the op refuses these inputs; all runs are with N 5 -> 8, K 12 -> 16"
        " (RuntimeError: N=5 is no multiple of 8)",
    )
    assert report.claims[1].how.startswith("N 8 -> 16: same numbers")
    assert "note: the op refuses these inputs" in str(report)


@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_a_python_kernel_may_refuse_with_any_error(define, error):
    def refuses(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        if w.shape[0] % 8:
            raise error("N % 8")
        return gemm(x, w, scale, bias)

    report = check_contract(define(GEMM_SCHEMA, refuses, padding()), operands(3, 5, 12))
    assert "align['n']" in report.holds
    assert f"({error.__name__}: N % 8)" in report.notes[0]


def test_an_op_that_refuses_aligned_inputs_too_raises_its_first_error(define):
    def refuses(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        raise ValueError(f"N={w.shape[0]}")

    op = define(GEMM_SCHEMA, refuses, padding())
    with pytest.raises(ValueError, match=r"^N=5$"):
        check_contract(op, operands(3, 5, 12))


def test_blocks_and_a_scale_for_the_whole_tensor(define):
    def blocks(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        assert scale is not None
        return gemm(x, w, scale.repeat_interleave(4)[: w.shape[0]], bias)

    op = define(GEMM_SCHEMA, blocks, padding(scale=Pad(1.0, block=4)))
    x, w, _, bias = operands(3, 4, 12)  # one block of N, which gets a second one
    assert "align['n']" in check_contract(op, (x, w, torch.ones(1), bias)).holds
    op = define(GEMM_SCHEMA.replace("gemm", "gemm_2"), gemm, padding())
    assert "align['n']" in check_contract(op, (x, w, torch.ones(1), bias)).holds
    report = check_contract(op, (x, w, torch.ones(3, 1), bias))  # neither n nor one
    assert report.not_exercised["align['n']"] == (
        "no pass pads it: scale of shape [3, 1] has no single axis of 4 for N"
    )


# m1_variant


def test_the_variant_for_one_token(define, assert_false):
    def wrong(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        return gemm(x, w, scale, None)  # forgets the bias

    right_op = define(GEMM_SCHEMA.replace("gemm", "gemm_m1"), gemm)
    wrong_op = define(GEMM_SCHEMA.replace("gemm", "gemm_wrong"), wrong)
    op = define(GEMM_SCHEMA, gemm, OpContract(gemm=GEMM, m1_variant=right_op))
    for m, words in ((1, "one token"), (3, "the first of 3 tokens")):
        report = check_contract(op, operands(m, 5, 12))
        assert report.claims[1].name == "m1_variant check_contract_tests.gemm_m1.default"
        assert report.claims[1].how == f"same numbers within rounding, for {words}"
    op = define(
        GEMM_SCHEMA.replace("gemm", "gemm_2"), gemm, OpContract(gemm=GEMM, m1_variant=wrong_op)
    )
    found = r"m1_variant check_contract_tests.gemm_wrong.default: argument 'x' with one token: res"
    assert_false(op, operands(1, 5, 12), rf"{found}ult\[0, 0\] is .*, 5 of 5 elem", "within round")


@pytest.mark.parametrize("axis", [0, 1])
def test_the_variant_for_one_token_where_m_is_one_axis(define, assert_false, axis):
    """x [m, h, k] or [h, m, k], with a scale for each row; w [h, n, k]."""

    def bmm(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return torch.einsum("mhk,hnk->mhn" if axis == 0 else "hmk,hnk->hmn", x * scale, w)

    def one(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        assert x.shape[axis] == scale.shape[axis] == 1
        return bmm(x, w, scale)

    def wrong(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return bmm(x, w, scale * 2)

    schema = "(Tensor x, Tensor w, Tensor scale) -> Tensor"
    gemm = Gemm(a="x", b="w", scale_a="scale", m_axis=axis)
    variant = define(f"bmm_m1{schema}", one)
    op = define(f"bmm{schema}", bmm, OpContract(gemm=gemm, m1_variant=variant))
    for m, words in ((1, "one token"), (3, "the first of 3 tokens")):
        lead = (m, 2) if axis == 0 else (2, m)
        x, w, scale = torch.randn(*lead, 8), torch.randn(2, 5, 8), torch.rand(*lead, 1)
        report = check_contract(op, (x, w, scale))
        assert report.claims[1].how == f"same numbers within rounding, for {words}"
    variant = define(f"bmm_wrong{schema}", wrong)
    op = define(f"bmm_2{schema}", bmm, OpContract(gemm=gemm, m1_variant=variant))
    assert_false(
        op, (x, w, scale), r"with the first of 3 tokens: result\[0, 0, 0\]", "within round"
    )
