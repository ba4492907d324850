"""Questions about sizes that kernels ask when they choose: none adds a guard."""

from __future__ import annotations

import torch
from torch import SymInt
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compile_ext.ops import checks


def symbol(hint: int) -> tuple[SymInt, ShapeEnv]:
    """A size that is ``hint`` in this call, and 2 or more in others."""
    env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])  # type: ignore[call-arg]
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.empty(hint), symbolic_context=context, source=ConstantSource("x"))
    size = x.shape[0]
    assert isinstance(size, SymInt)
    return size, env


def test_a_symbol_is_not_taken_for_what_it_is_in_this_call() -> None:
    size, env = symbol(8)
    assert not checks.at_most(size, 16)
    assert not checks.is_zero(size)
    assert checks.known(size) is None
    assert env.guards == []


def test_numbers() -> None:
    assert [checks.at_most(x, 16) for x in (0, 16, 17)] == [True, True, False]
    assert [checks.is_zero(x) for x in (0, 1)] == [True, False]
