"""What an op reads and writes: for each claim one of which it is true, and one of which not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import OpContract
from compile_ext.testing import check_contract

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
    assert report.holds == ("clean runs", "unread['scale']", "bounds (every op)")
    assert report.claims[1].how == (
        "equal bits with NaN, Inf, the largest, the smallest, zero, 0xFF bytes, None;"
        " the fake takes None"
    )
    assert report.runs == 2 + 7 + 2  # clean, poisons, bounds


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
        r"unread\['scale'\]: argument 'scale' filled with NaN: result\[1, 2\] is nan,"
        r" 1 of 6 elements differ: the op reads 'scale'$",
        "^6 bit for bit$",
        "mend the op, or let the predicate of 'scale' say False for such calls",
    )


def test_an_op_that_reads_a_bound_which_nan_and_large_values_do_not_move(define, assert_false):
    bound = torch.full((1,), 100.0)
    op = define(SCALED, lambda x, scale, scale_it: torch.fmin(x, scale[0]), UNREAD, fake)
    found = r"argument 'scale' filled with the smallest: result\[0, 0\] is -3.40282e\+38"
    assert_false(op, (X, bound, False), found, "^0 bit for bit")
    schema = SCALED.replace("scaled", "scaled_2")
    op = define(schema, lambda x, scale, scale_it: x + (scale == 0), UNREAD, fake)
    assert_false(op, (X, bound, False), "'scale' filled with zero: result", "^0 bit for bit")


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
    "dtype",
    [
        torch.int32,
        torch.int8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
    ],
)
def test_an_unread_argument_of_any_dtype(define, assert_false, dtype):
    def reads(x: Tensor, scale: Tensor | None, scale_it: bool) -> Tensor:
        if scale is None:
            return x + 1
        bits = scale.reshape(1).view(torch.uint8).sum()
        return x + torch.where(bits == int(sum(clean.view(torch.uint8))), 1, 2)

    clean = torch.ones(1).to(dtype)
    op = define(SCALED, reads, UNREAD, fake)
    assert_false(op, (X, clean, False), r"argument 'scale' filled with .*: result\[0, 0\]", "^1 ")
    op = define(SCALED.replace("scaled", "scaled_2"), scaled, UNREAD, fake)
    assert "unread['scale']" in check_contract(op, (X, clean, False)).holds


def test_an_argument_without_elements_or_in_written_memory_is_not_exercised(define):
    op = define(SCALED, scaled, UNREAD, fake)
    report = check_contract(op, (X, torch.ones(0), False))
    assert report.not_exercised == {"unread['scale']": "scale has no elements in these inputs"}
    schema = "into_2(Tensor(a!) x, Tensor? scale) -> ()"

    def clears(x: Tensor, scale: Tensor | None) -> None:
        x.zero_()

    op = define(schema, clears, OpContract(unread={"scale": lambda **_: True}))
    x = X.clone()
    why = check_contract(op, (x, x[0])).not_exercised["unread['scale']"]
    assert why == "scale lies in the memory of x, and the op writes there"


# overwritten

INTO = "into(Tensor x, Tensor(a!) out) -> ()"
OVERWRITTEN = OpContract(overwritten=("out",))


def test_overwritten_is_proved(define):
    op = define(INTO, double_into, OVERWRITTEN)
    out = torch.full_like(X, 7)
    report = check_contract(op, (X, out))
    assert report.holds == ("clean runs", "overwritten 'out'", "bounds (every op)")
    assert bool((out == 7).all())  # the caller's tensors are left alone


def double_into(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


def accumulate_into(x: Tensor, out: Tensor) -> None:
    out.add_(x)


def almost_fill(x: Tensor, out: Tensor) -> None:
    out[:, :2] = x[:, :2]


def test_a_buffer_that_the_op_resizes(define):
    def resizes(x: Tensor, out: Tensor) -> None:
        out.resize_(x.shape).copy_(x)

    op = define(INTO, resizes, OVERWRITTEN)
    assert "overwritten 'out'" in check_contract(op, (X, torch.zeros(2, 3))).holds
    assert "clean runs" in check_contract(op, (X, torch.zeros(0))).holds


@pytest.mark.parametrize(
    ("run", "element"), [(accumulate_into, r"\[0, 0\]"), (almost_fill, r"\[0, 2\]")]
)
def test_an_op_that_reads_or_leaves_what_was_in_its_buffer(define, assert_false, run, element):
    op = define(INTO, run, OVERWRITTEN)
    found = rf"overwritten 'out': argument 'out' filled with NaN before: argument 'out'{element} is"
    assert_false(op, (X, torch.zeros(2, 3)), found, "^0 bit for bit", "without reading it")


def test_a_buffer_in_the_memory_of_another_argument_is_not_exercised(define):
    op = define(INTO, double_into, OVERWRITTEN)
    x = X.clone()
    report = check_contract(op, (x, x))
    assert report.not_exercised == {
        "overwritten 'out'": "out lies in the memory of x, and the op writes there",
        "bounds (every op)": "x, in the memory of out; out, in the memory of x",
    }


# several at once, as a pass strips them


def test_arguments_that_are_unread_alone_but_not_together(define, assert_false):
    def needs_one(x: Tensor, s: Tensor | None, t: Tensor | None) -> Tensor:
        if s is None and t is None:
            raise ValueError("one of s and t")
        return x + 1

    contract = OpContract(unread={"s": lambda **_: True, "t": lambda **_: True})
    op = define("two(Tensor x, Tensor? s, Tensor? t) -> Tensor", needs_one, contract, fake)
    found = r"unread\['s', 't'\]: all of them None: the op raises ValueError: one of s and t"
    assert_false(op, (X, torch.ones(1), torch.ones(1)), found, "what the clean run", "a predicate")
    schema = "two_2(Tensor x, Tensor? s, Tensor? t) -> Tensor"
    op = define(schema, lambda x, s, t: x + 1, contract, fake)
    report = check_contract(op, (X, torch.ones(1), torch.ones(1)))
    assert report.claims[3].name == "unread['s', 't']"
    assert report.claims[3].how == "equal bits with all of them poisoned, None"
    assert "unread['s', 't']" not in check_contract(op, (X, torch.ones(1), None)).holds


def test_buffers_that_are_overwritten_alone_but_not_together(define, assert_false):
    def reads_both(x: Tensor, o: Tensor, p: Tensor) -> None:
        value = 9 if o.isnan().any() and p.isnan().any() else 1
        o.fill_(value)
        p.copy_(x)

    schema = "both(Tensor x, Tensor(a!) o, Tensor(b!) p) -> ()"
    op = define(schema, reads_both, OpContract(overwritten=("o", "p")))
    found = r"overwritten 'o', 'p': all of them poisoned before: argument 'o'\[0\] is 9"
    assert_false(op, (X, torch.zeros(2), torch.zeros(2, 3)), found, "^1 bit for bit")


# what the schema says


def test_an_op_that_is_not_deterministic(define, assert_false):
    calls: list[int] = []

    def counts(x: Tensor) -> Tensor:
        calls.append(1)
        return x + len(calls)

    op = define("counts(Tensor x) -> Tensor", counts, OpContract())
    found = r"second clean run: result\[0, 0\] is 2, 6 of 6 elements differ: .* not deterministic"
    assert_false(op, (X,), found, "^1 as in the first clean run", "for which it is deterministic")


def test_random_numbers_are_the_same_in_each_run(define):
    op = define("dropout(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x), OpContract())
    assert check_contract(op, (X,)).holds == ("clean runs", "bounds (every op)")


def test_an_op_that_writes_an_undeclared_argument(define, assert_false):
    def clobbers(x: Tensor, y: Tensor) -> Tensor:
        y[1] = 5
        return x + 1

    op = define("clobbers(Tensor x, Tensor y) -> Tensor", clobbers, OpContract())
    found = r"clean run: argument 'y' was written: 'y'\[1\] is 5, 1 of 3 elements differ"
    assert_false(op, (X, torch.zeros(3)), found, "^0 as before the call", "Tensor(a!)")


def test_a_result_in_the_memory_of_an_argument(define, assert_false):
    op = define("view(Tensor x, Tensor y) -> Tensor", lambda x, y: y[:1], OpContract())
    found = "clean run: result lies in the memory of argument 'y'"
    assert_false(op, (X, torch.zeros(3)), found, "a result of its own", "clone() it")
    op = define("view_2(Tensor(a) x) -> Tensor(a)", lambda x: x[:1], OpContract())
    assert check_contract(op, (X,)).holds == ("clean runs", "bounds (every op)")
