"""Derivations: pads, strides, programs and chains of them, and which of them are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compile_ext.passes.derivation import Chain, Padding, Program, Restride, after


@pytest.mark.parametrize("pad", [(0, 2), (0, 0, 0, 2), (1, 2, 3, 4), (0, 2, 0, 3)], ids=str)
@pytest.mark.parametrize("permutation", [(0, 1), (1, 0)], ids=str)
def test_pad_keeps_the_memory_order(pad: tuple[int, ...], permutation: tuple[int, int]) -> None:
    x = torch.randn(6, 8).permute(permutation)
    got = Padding(pad, 1.5, keep_order=True)(x)
    assert torch.equal(got, F.pad(x, pad, value=1.5))
    assert (got.stride(0) > got.stride(1)) == (x.stride(0) > x.stride(1))
    assert Padding(pad, 1.5)(x).stride() == F.pad(x, pad).stride()


def test_pad_of_float8() -> None:
    x = torch.randn(6, 8).to(torch.float8_e4m3fn)
    got = Padding((0, 8, 0, 2), 0.0)(x)
    assert got.dtype == torch.float8_e4m3fn
    assert torch.equal(got.float(), F.pad(x.float(), (0, 8, 0, 2)))


def test_chain_applies_in_order() -> None:
    x = torch.randn(2, 3)
    got = Chain(Padding((0, 1), 1.0), (Padding((0, 1), 2.0),))(x)
    assert torch.equal(got, F.pad(F.pad(x, (0, 1), value=1.0), (0, 1), value=2.0))


@pytest.mark.parametrize(
    ("size", "stride", "want"),
    [
        ((3, 5), (5, 1), (8, 1)),
        ((3, 5), (1, 3), (1, 8)),  # column-major stays that
        ((3, 5), (45, 1), (8, 1)),  # a slice of something wider
        ((2, 3, 5), (15, 5, 1), (24, 8, 1)),
        ((5,), (2,), (1,)),
    ],
    ids=str,
)
def test_restride(size: tuple[int, ...], stride: tuple[int, ...], want: tuple[int, ...]) -> None:
    x = torch.randn(200).as_strided(size, stride)
    got = Restride(8)(x)
    assert torch.equal(got, x)
    assert got.stride() == want
    assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_what_fits_is_not_copied() -> None:
    for x in (torch.randn(3, 8), torch.randn(3, 40)[:, :5]):
        assert Restride(8)(x).data_ptr() == x.data_ptr()
    odd = torch.randn(4 * 40)[1:].as_strided((3, 5), (40, 1))
    made = Restride(8, 16)(odd)
    assert torch.equal(made, odd)
    assert (made.data_ptr() % 16, made.stride()) == (0, (40, 1))  # strides that a graph relies on


def test_after_makes_one_pad_of_two_with_one_value(derive: Any) -> None:
    first, x = Padding((0, 1), 2.0, keep_order=True), torch.randn(3, 2).t()
    merged = after(first, Padding((0, 0, 0, 3), 2.0))
    assert merged == Padding((0, 1, 0, 3), 2.0, keep_order=True)
    assert torch.equal(merged(x), F.pad(x, (0, 1, 0, 3), value=2.0))
    cat = derive(lambda q: torch.cat([q, q]))
    chain = Chain(cat, (Padding((0, 1), 2.0),))
    assert after(chain, Padding((0, 2), 2.0)) == Chain(cat, (Padding((0, 3), 2.0),))


STEPS: dict[str, tuple[Any, Padding | Restride]] = {  # a padding or a function, and what follows
    "other value": (Padding((0, 1), 2.0), Padding((0, 1), 3.0)),
    "in front": (Padding((1, 0), 2.0), Padding((0, 1), 2.0)),
    "restride": (Padding((0, 1), 2.0), Restride(8)),
    "computed": (lambda w: w * 2, Padding((0, 1), 2.0)),
}


@pytest.mark.parametrize(("first", "then"), STEPS.values(), ids=STEPS)
def test_after_chains_what_is_no_single_pad(
    first: Any, then: Padding | Restride, derive: Any
) -> None:
    first = first if isinstance(first, Padding) else derive(first)
    how, x = after(first, then), torch.randn(3, 5)
    assert how == Chain(first, (then,))
    assert torch.equal(how(x), then(first(x)))
    assert how(x).stride() == then(first(x)).stride()


@pytest.mark.parametrize("then", [Restride(16), Padding((0, 1), 3.0)], ids=str)
def test_after_a_chain(then: Padding | Restride, derive: Any) -> None:
    chain, x = Chain(derive(lambda w: w * 2), (Padding((0, 1), 2.0),)), torch.randn(3, 5)
    assert torch.equal(after(chain, then)(x), then(chain(x)))


def test_a_pad_of_a_placeholder_is_a_padding_and_all_else_a_derive(derive: Any) -> None:
    assert derive(lambda w: F.pad(w, (0, 1), value=2.0)) == Padding((0, 1), 2.0)
    how = derive(lambda w: F.pad(w, (0, 1)).t())
    assert isinstance(how, Program)
    assert str(how) == "pad, t"
    x = torch.randn(3, 5)
    assert torch.equal(how(x), F.pad(x, (0, 1)).t())


SPELLINGS: dict[str, Callable[[Any], Tensor]] = {
    "1": lambda w: w * 1,
    "1.0": lambda w: w * 1.0,
    "True": lambda w: w * True,
    "add": lambda w: w + 1,
    "0.0": lambda w: w * 0.0,
    "-0.0": lambda w: w * -0.0,
    "method": lambda w: w.mul(1),
    "op": lambda w: torch.mul(w, 1),
    "slice": lambda w: w[1:] * 1,
    "other slice": lambda w: w[:1] * 1,
    "float16": lambda w: w.to(torch.float16),
    "bfloat16": lambda w: w.to(torch.bfloat16),
    "order": lambda w: (w * 1).t(),
    "other order": lambda w: w.t() * 1,
}


def test_programs_are_equal_only_if_they_compute_the_same(derive: Any) -> None:
    made = {name: derive(f) for name, f in SPELLINGS.items()}
    assert len(set(made.values())) == len(SPELLINGS)
    for name, f in SPELLINGS.items():
        again = derive(f)
        assert again == made[name]
        assert hash(again) == hash(made[name])
    assert derive(lambda a, b: a - b) != derive(lambda a, b: b - a)
