"""For every claim an op of which it is true, and one of which it is false."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import Align, Gemm, OpContract, Pad
from compile_ext.testing import check_contract

GEMM = Gemm(a="x", b="w", scale_b="scale", bias="bias")
SCALED = "scaled(Tensor x, Tensor? scale, bool scale_it) -> Tensor"
UNREAD = OpContract(unread={"scale": lambda scale_it, **_: not scale_it})
X = torch.arange(6.0).reshape(2, 3)


def scaled(x: Tensor, scale: Tensor | None, scale_it: bool) -> Tensor:
    return x * scale if scale_it and scale is not None else x + 1


def fake(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


def reads_nan(x: Tensor, scale: Tensor | None, scale_it: bool) -> Tensor:
    """What a kernel does that multiplies by zero where it should not read."""
    out = x + 1
    out[1, 2] += 0 if scale is None else 0 * scale[0]
    return out


# unread


def test_unread_is_proved(define):
    op = define(SCALED, scaled, UNREAD, fake)
    report = check_contract(op, (X, torch.ones(1), False))
    assert report.proved == ("schema", "unread['scale']", "bounds")
    assert report.claims[1].how == (
        "equal bits with NaN, Inf, the largest, 0xFF bytes, None; the fake takes None"
    )
    assert report.runs == 2 + 5 + 2  # clean, poisons, bounds


def test_unread_is_not_exercised_where_the_predicate_says_false_or_there_is_none(define):
    op = define(SCALED, scaled, UNREAD, fake)
    report = check_contract(op, (X, torch.ones(1), True))
    assert report.not_exercised == {"unread['scale']": "the predicate says False for these inputs"}
    report = check_contract(op, (X, None, False))
    assert report.not_exercised == {
        "unread['scale']": "scale is None in these inputs: pass a tensor"
    }


def test_an_op_that_reads_its_unread_scale(define, assert_false):
    op = define(SCALED, reads_nan, UNREAD, fake)
    assert_false(
        op,
        (X, torch.ones(1), False),
        r"unread\['scale'\]: argument 'scale' filled with NaN: result \[1, 2\] is nan;"
        r" 1 of 6 elements differ",
        "^6 bit for bit$",
        "the op reads 'scale'",
    )


def test_an_op_that_raises_for_a_poisoned_scale_or_for_none(define, assert_false):
    def refuses(x: Tensor, scale: Tensor | None, scale_it: bool) -> Tensor:
        if scale is None:
            raise ValueError("no scale")
        if scale.isnan().any():
            raise ArithmeticError("a NaN")
        return x + 1

    op = define(SCALED, refuses, UNREAD, fake)
    found = r"'scale' filled with NaN: the op raises ArithmeticError: a NaN"
    error = assert_false(op, (X, torch.ones(1), False), found, "what the clean run returns")
    assert isinstance(error.__cause__, ArithmeticError)

    def takes_no_none(x: Tensor, scale: Tensor | None, scale_it: bool) -> Tensor:
        if scale is None:
            raise ValueError("no scale")
        return x + 1

    op = define(SCALED.replace("scaled", "scaled_2"), takes_no_none, UNREAD, fake)
    assert_false(op, (X, torch.ones(1), False), r"'scale' None: the op raises ValueError", "clean")


def test_a_fake_that_does_not_take_none_or_then_gives_another_shape(define, assert_false):
    def raises(x: Tensor, scale: Tensor, scale_it: bool) -> Tensor:
        return x.new_empty(x.shape[0], 3 * scale.numel())

    op = define(SCALED, scaled, UNREAD, raises)
    found = r"argument 'scale' None: the fake raises AttributeError"
    wanted = r"torch.float32 \[2, 3\], strides \[3, 1\], on cpu"
    assert_false(op, (X, torch.ones(1), False), found, wanted, "accept scale=None")

    def other(x: Tensor, scale: Tensor | None, scale_it: bool) -> Tensor:
        return x.new_empty(x.shape[0], 3 if scale is not None else 4)

    op = define(SCALED.replace("scaled", "scaled_2"), scaled, UNREAD, other)
    found = r"the fake gives \['torch.float32 \[2, 4\]"
    assert_false(op, (X, torch.ones(1), False), found, wanted)


def test_without_a_fake_none_is_tried_on_the_op_alone(define):
    def looks(x: Tensor, scale: Tensor | None, scale_it: bool) -> Tensor:
        return x + len(x.tolist())  # which a fake cannot

    op = define(SCALED, looks, UNREAD)
    how = check_contract(op, (X, torch.ones(1), False)).claims[1].how
    assert "None; the fake was not tried with None: it raises as it is (" in how


def test_a_plain_tensor_is_not_tried_with_none(define):
    schema = SCALED.replace("Tensor?", "Tensor")
    report = check_contract(define(schema, scaled, UNREAD, fake), (X, torch.ones(1), False))
    assert report.claims[1].how.endswith("0xFF bytes; the schema does not allow None")


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_an_unread_argument_of_any_dtype(define, assert_false, dtype):
    def reads(x: Tensor, scale: Tensor | None, scale_it: bool) -> Tensor:
        if scale is None:
            return x + 1
        bits = scale.reshape(1).view(torch.uint8).sum()
        return x + torch.where(bits == int(sum(clean.view(torch.uint8))), 1, 2)

    clean = torch.ones(1).to(dtype)
    op = define(SCALED, reads, UNREAD, fake)
    assert_false(op, (X, clean, False), r"argument 'scale' filled with .*: result \[0, 0\]", "^1 ")
    op = define(SCALED.replace("scaled", "scaled_2"), scaled, UNREAD, fake)
    assert "unread['scale']" in check_contract(op, (X, clean, False)).proved


# overwritten

INTO = "into(Tensor x, Tensor(a!) out) -> ()"
OVERWRITTEN = OpContract(overwritten=("out",))


def test_overwritten_is_proved(define):
    op = define(INTO, double_into, OVERWRITTEN)
    out = torch.full_like(X, 7)
    report = check_contract(op, (X, out))
    assert report.proved == ("schema", "overwritten 'out'", "bounds")
    assert bool((out == 7).all())  # the caller's tensors are left alone


def double_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


def accumulate_into(x: Tensor, out: Tensor) -> None:
    out.add_(x)


def almost_fill(x: Tensor, out: Tensor) -> None:
    out[:, :2] = x[:, :2]


@pytest.mark.parametrize(
    ("run", "element"), [(accumulate_into, r"\[0, 0\]"), (almost_fill, r"\[0, 2\]")]
)
def test_an_op_that_reads_or_leaves_what_was_in_its_buffer(define, assert_false, run, element):
    op = define(INTO, run, OVERWRITTEN)
    found = rf"overwritten 'out': argument 'out' filled with NaN before: argument 'out' {element}"
    assert_false(op, (X, torch.zeros(2, 3)), found, "^0 bit for bit", "without reading it")


def test_a_buffer_in_the_memory_of_another_argument_is_not_exercised(define):
    op = define(INTO, double_into, OVERWRITTEN)
    x = X.clone()
    report = check_contract(op, (x, x))
    assert report.not_exercised == {
        "overwritten 'out'": "out lies in the memory of x",
        "bounds": "x, in the memory of out; out, in the memory of x",
    }


# align

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
    assert report.proved == (
        "schema", "align['n']", "align['k']", "align['n', 'k']", "bounds",
    )  # fmt: skip
    assert report.claims[1].how == f"{words}: same numbers within rounding; the pads are not read"
    assert report.claims[2].how == "K 12 -> 16: same numbers within rounding"
    assert not report.notes


def test_a_pad_that_changes_the_sum(define, assert_false):
    contract = OpContract(gemm=GEMM, align={"k": Align(8, pad={"x": 1.0, "w": 1.0})})
    op = define(GEMM_SCHEMA, gemm, contract)
    found = (
        r"align\['k'\]: K 12 -> 16, x, w padded: result \[0, 0\] is .*; 15 of 15 elements differ"
    )
    assert_false(op, operands(3, 5, 12), found, "within rounding", "pad values or the axes of x, w")


def test_a_pad_that_reaches_the_first_columns(define, assert_false):
    def normalised(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        assert scale is not None
        return gemm(x, w, scale / scale.amax(), bias)

    op = define(GEMM_SCHEMA, normalised, padding(scale=9.0))
    found = r"align\['n'\]: N 5 -> 8, w, scale, bias padded: result \[0, 0\]"
    assert_false(op, operands(3, 5, 12), found, "within rounding")
    # With a value that cannot be the largest, the claim is true, and rests on that value.
    op = define(GEMM_SCHEMA.replace("gemm", "gemm_2"), normalised, padding(scale=0.0))
    how = check_contract(op, operands(3, 5, 12)).claims[1].how
    assert how.endswith("same numbers within rounding; rests on the pad values of scale")


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


def test_blocks_and_a_scale_for_the_whole_tensor(define):
    def blocks(x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        assert scale is not None
        return gemm(x, w, scale.repeat_interleave(4)[: w.shape[0]], bias)

    op = define(GEMM_SCHEMA, blocks, padding(scale=Pad(1.0, block=4)))
    x, w, _, bias = operands(3, 4, 12)  # one block of N, which gets a second one
    assert "align['n']" in check_contract(op, (x, w, torch.ones(1), bias)).proved
    op = define(GEMM_SCHEMA.replace("gemm", "gemm_2"), gemm, padding())
    assert "align['n']" in check_contract(op, (x, w, torch.ones(1), bias)).proved
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
    assert_false(op, operands(1, 5, 12), rf"{found}ult \[0, 0\] is .*; 5 of 5 elem", "within round")


# what the schema says


def test_an_op_that_is_not_deterministic(define, assert_false):
    calls: list[int] = []

    def counts(x: Tensor) -> Tensor:
        calls.append(1)
        return x + len(calls)

    op = define("counts(Tensor x) -> Tensor", counts, OpContract())
    found = (
        r"two clean runs that differ: result \[0, 0\] is 2; 6 of 6 elements differ in the second"
    )
    assert_false(op, (X,), found, "^1 as in the first; .* not deterministic")


def test_random_numbers_are_the_same_in_each_run(define):
    op = define("dropout(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x), OpContract())
    assert check_contract(op, (X,)).proved == ("schema", "bounds")


def test_an_op_that_writes_an_undeclared_argument(define, assert_false):
    def clobbers(x: Tensor, y: Tensor) -> Tensor:
        y[1] = 5
        return x + 1

    op = define("clobbers(Tensor x, Tensor y) -> Tensor", clobbers, OpContract())
    found = r"clean run: argument 'y' was written, and \[1\] is 5; 1 of 3 elements differ"
    assert_false(op, (X, torch.zeros(3)), found, "^0 as before the call", "Tensor(a!)")


def test_a_result_in_the_memory_of_an_argument(define, assert_false):
    op = define("view(Tensor x, Tensor y) -> Tensor", lambda x, y: y[:1], OpContract())
    found = "clean run: result lies in the memory of argument 'y'"
    assert_false(op, (X, torch.zeros(3)), found, "a result of its own", "clone() it")
    op = define("view_2(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], OpContract())
    assert check_contract(op, (X,)).proved == ("schema", "bounds")
