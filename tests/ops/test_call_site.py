"""A call described, and made again for any M."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_sites import block_scaled, dense, router, site
from hypothesis import given
from hypothesis import strategies as st

from compile_ext.ops.call_site import (
    Call,
    NotReachable,
    SizeValue,
    TensorForm,
    compiled,
    run_calls,
    value_of,
)


@pytest.mark.parametrize(
    ("size", "m", "value"),
    [
        (7168, 5, 7168),
        ("M", 5, 5),
        ("4*((M + 3)//4)", 5, 8),
        ("M*56 - 1", 2, 111),
        ("FloorDiv(M, 2)", 5, 2),
        ("Max(1, Min(M, 4))", 9, 4),
        ("Mod(M, 4) + M % 3", 7, 4),
        ("M/4", 8, 2),
    ],
)
def test_sizes(size: int | str, m: int, value: int) -> None:
    assert value_of(size, m) == value


@pytest.mark.parametrize(("size", "m"), [("M/4", 6), ("M - 3", 2), ("1//(M - 1)", 1)])
def test_a_size_without_a_value_is_not_reachable(size: str, m: int) -> None:
    with pytest.raises(NotReachable, match=r"M is \d"):
        value_of(size, m)


@pytest.mark.parametrize(
    "size",
    ["", "N", "M.real", "M(3)", "__import__('os')", "M if M else 1", "[M]", "M ** 9", "True",
     "2.5", "M\x00", "(" * 5000, "lambda: M", "Max(M, *[1])", "Max(M, key=1)"],
)  # fmt: skip
def test_what_is_no_expression_is_refused_and_not_run(size: str) -> None:
    with pytest.raises(ValueError, match="is no expression in M"):
        compiled(size)


@given(st.text(alphabet="M0123456789+-*/%(), MaxinFlorDv", max_size=30), st.integers(0, 10**6))
def test_any_text_is_a_size_or_an_error(text: str, m: int) -> None:
    try:
        found = value_of(text, m)
    except ValueError:
        return
    assert type(found) is int
    assert found >= 0


def test_a_tensor_lies_as_described() -> None:
    form = TensorForm("float32", ("M", 3), (1, "4*((M + 3)//4)"), 8)
    made = form.make(5, "cpu")
    assert (made.shape, made.stride(), made.storage_offset()) == ((5, 3), (1, 8), 8)
    assert made.untyped_storage().nbytes() == 4 * (8 + 2 * 8 + 4 + 1)
    assert not made.any()
    assert form.make(0, "cpu").shape == (0, 3)
    assert not form.is_fixed
    assert dense("bfloat16", 4, 8).is_fixed


def test_integers_are_zeros_and_other_values_are_themselves() -> None:
    made = site(
        "grouped", (1, None), 4, 8,
        indices=dense("int32", "M"), expected=SizeValue("M + 1"), out=torch.bfloat16,
        groups=(2, 3), eps=1e-6, bias=None, scores="softmax",
    ).make(3, "cpu")  # fmt: skip
    assert made.pop("indices").tolist() == [0, 0, 0]
    assert made == {
        "expected": 4, "out": torch.bfloat16, "groups": [2, 3], "eps": 1e-6, "bias": None,
        "scores": "softmax", "pinned": None,
    }  # fmt: skip


def test_a_dtype_that_torch_has_not() -> None:
    with pytest.raises(ValueError, match="'float7' is no dtype"):
        TensorForm("float7", (1,), (1,)).make(1, "cpu")


def test_calls_run_the_op_and_share_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    s = router(8, 16)
    made: list[Any] = []
    original = TensorForm.make

    def make(self: TensorForm, m: int, device: Any) -> Any:
        made.append((self.shape, m))
        return original(self, m, device)

    monkeypatch.setattr(TensorForm, "make", make)
    run_calls([Call(s, 2, "reference"), Call(s, 3)], "cpu")
    assert made == [((8, 16), 0), (("M", 16), 2), (("M", 16), 3)]


def test_an_op_that_nobody_registered() -> None:
    with pytest.raises(AttributeError, match="no_such_op"):
        _ = site("no_such_op", (1, 1), None, None).overload


def test_sites_are_values() -> None:
    assert block_scaled(576, 7168) == block_scaled(576, 7168)
    assert len({block_scaled(576, 7168), block_scaled(576, 7168), block_scaled(64, 7168)}) == 2
