"""Ops of the fill tests: honest and lying contracts, mutable ops, ops without a contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType
from torch.library import Library, register_fake

import compile_ext
from compile_ext import OpContract

_LIBRARY = Library("compile_ext_fills", "DEF")


def _define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    contract: OpContract | None = None,
) -> None:
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"compile_ext_fills::{name}", fake, lib=_LIBRARY)
    if contract is not None:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.compile_ext_fills, packet), overload or "default")
        compile_ext.register_contract(op, contract)


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _nothing(*_: Any) -> None:
    return None


def _out(x: Tensor, *, out: Tensor) -> Tensor:
    return out


UNREAD = OpContract(unread={"s": lambda **_: True})

# Reads nothing of s, as its contract says; and two that lie.
_define("ignores(Tensor x, Tensor s) -> Tensor", lambda x, s: x + 1, _like, UNREAD)
_define("lies(Tensor x, Tensor s) -> Tensor", lambda x, s: x + s, _like, UNREAD)
_define(
    "lies_optional(Tensor x, Tensor? s) -> Tensor",
    lambda x, s: x + 1 if s is None else x + s,
    _like,
    UNREAD,
)
_define("reads(Tensor x, Tensor s) -> Tensor", lambda x, s: x * s.to(x.dtype), _like)


def _copy(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(x)


# ``out=`` as ATen spells it: one packet, two overloads.
_define("copy(Tensor x) -> Tensor", lambda x: x.clone(), _like)
_define(
    "copy.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    _copy,
    _out,
    OpContract(overwritten=("out",)),
)


def _sums(xs: list[Tensor], out: Tensor) -> None:
    out.copy_(torch.stack(xs).sum(0))


_define(
    "sums(Tensor[] xs, Tensor(a!) out) -> ()",
    _sums,
    _nothing,
    OpContract(overwritten=("out",)),
)


def _quantize(x: Tensor, q: Tensor, s: Tensor) -> None:
    calls.append("quantize")
    scale = x.abs().amax(-1, keepdim=True)
    s.copy_(scale)
    q.copy_(x / scale)


# A quantization as vLLM registers it: both results are buffers that the caller makes.
_define(
    "quantize(Tensor x, Tensor(a!) q, Tensor(b!) s) -> ()",
    _quantize,
    _nothing,
    OpContract(overwritten=("q", "s")),
)


def _add_out(x: Tensor, out: Tensor) -> None:
    out.add_(x)


def _half_out(x: Tensor, out: Tensor) -> None:
    out[: len(out) // 2].copy_(x[: len(out) // 2])


# Two that lie: one reads what it says it overwrites, one leaves half of it.
_define(
    "adds(Tensor x, Tensor(a!) out) -> ()", _add_out, _nothing, OpContract(overwritten=("out",))
)
_define(
    "half(Tensor x, Tensor(a!) out) -> ()", _half_out, _nothing, OpContract(overwritten=("out",))
)


def _effect(x: Tensor) -> Tensor:
    calls.append("effect")
    return x.clone()


# Counts its calls: one tells torch so, the other does not, and is a function for all the world.
_define("effect(Tensor x) -> Tensor", _effect, _like)
_define("function(Tensor x) -> Tensor", _effect, _like)
torch.library._register_effectful_op(  # pyright: ignore[reportAttributeAccessIssue]
    "compile_ext_fills::effect", _EffectType.ORDERED
)


_LIBRARY.define("draws(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.impl("draws", torch.rand_like, "CompositeExplicitAutograd")
register_fake("compile_ext_fills::draws", _like, lib=_LIBRARY)


def _effect_out(x: Tensor, out: Tensor) -> None:
    calls.append("effect")
    out.copy_(x)


_define("effect_out(Tensor x, Tensor(a!) out) -> ()", _effect_out, _nothing)


def _scales(x: Tensor, s: Tensor, unread: Tensor, out: Tensor) -> None:
    torch.mul(x, s, out=out)


_define(
    "scales(Tensor x, Tensor s, Tensor unread, Tensor(a!) out) -> ()",
    _scales,
    _nothing,
    OpContract(unread={"unread": lambda **_: True}, overwritten=("out",)),
)


def _peeks(x: Tensor, s: Tensor) -> Tensor:
    given.append(s.detach())
    return x.clone()


def _peeks_out(x: Tensor, out: Tensor) -> None:
    given.append(out.detach().clone())
    out.copy_(x)


# True contracts: the values have no part in the result, and a test can see them.
_define("peeks(Tensor x, Tensor s) -> Tensor", _peeks, _like, UNREAD)
_define(
    "peeks_out(Tensor x, Tensor(a!) out) -> ()",
    _peeks_out,
    _nothing,
    OpContract(overwritten=("out",)),
)

# What ran, by name: emptied before each test.
calls: list[str] = []


# What the peeking ops were handed.
given: list[Tensor] = []


@pytest.fixture
def seen() -> list[Tensor]:
    """What the peeking ops were handed, in order."""
    given.clear()
    return given


@pytest.fixture
def op_calls() -> list[str]:
    """The calls of the ops that count themselves, in order."""
    calls.clear()
    return calls


class _Filled(nn.Module):
    """``call(x, w, fill(x))`` with a weight w [8, 8]."""

    def __init__(self, call: Callable[..., Any], fill: Callable[..., Any]) -> None:
        super().__init__()
        self.call, self.fill = call, fill
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.call(x, self.w, self.fill(x))


@pytest.fixture
def filled() -> type[nn.Module]:
    """``filled(call, fill)``: a model that calls ``call(x, w, fill(x))`` with its weight [8, 8]."""
    return _Filled
