"""Faults that reviewers found in derived constants and homes: none of them comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import compile_ext

EAGER: dict[str, Any] = {"compile_ext.inner": "eager"}


class Padded(nn.Module):
    """A weight that is padded on each call; ``ballast`` makes room in the memory budget."""

    def __init__(self, n: int = 5) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(n, 4), requires_grad=False)
        self.ballast = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.rows = 3

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, F.pad(self.w, (0, 0, 0, self.rows))) + (self.ballast * x.sum()).mean()


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="compile_ext", options=EAGER)


@torch.no_grad()
def test_a_weight_that_shrinks_has_no_old_rows_behind_it() -> None:
    model, x = Padded(50), torch.randn(3, 4)
    call = compiled(model)
    assert torch.equal(call(x), model(x))
    model.w.data = model.w.data[:40]  # a vocabulary is trimmed
    for rows in (3, 13, 8):
        model.rows = rows
        assert torch.equal(call(x), model(x))


@torch.no_grad()
def test_a_call_on_fakes_leaves_the_weights_real() -> None:
    model, x = Padded(), torch.randn(3, 4)
    call, before = compiled(model), model.w.clone()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert call(mode.from_tensor(x)).shape == (3, 8)
    assert torch.equal(model.w, before)
    assert torch.equal(call(x), model(x))


@torch.no_grad()
def test_two_functions_of_one_name_are_two_programs() -> None:
    def make(factor: float) -> Any:
        def scaled(w: Tensor) -> Tensor:
            return w * factor

        return torch._dynamo.allow_in_graph(scaled)

    twice, thrice = make(2.0), make(3.0)

    class Two(Padded):
        def forward(self, x: Tensor) -> Any:
            return twice(self.w) @ x.t(), thrice(self.w) @ x.t(), (self.ballast * x.sum()).mean()

    model, x = Two(), torch.randn(3, 4)
    for got, want in zip(compiled(model)(x), model(x), strict=True):
        assert torch.equal(got, want)


@torch.no_grad()
def test_another_default_dtype_is_another_constant() -> None:
    class Third(Padded):
        def forward(self, x: Tensor) -> Any:
            return self.w * torch.full((4,), 1 / 3) + x.sum() + (self.ballast * x.sum()).mean()

    model, x = Third(), torch.ones(4)
    call = compiled(model)
    call(x)
    try:
        torch.set_default_dtype(torch.float64)
        got, want = call(x), model(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == want.dtype == torch.float64
    assert torch.equal(got, want)


@torch.no_grad()
def test_a_branch_that_is_not_taken_may_be_impossible() -> None:
    class Inverse(Padded):
        def __init__(self) -> None:
            super().__init__(4)
            self.w.zero_()

        def forward(self, x: Tensor) -> Any:
            branches = (lambda x: x @ torch.linalg.inv(self.w), lambda x: x.clone())
            return torch.cond(x.sum() > 0, *branches, (x,)) + (self.ballast * x.sum()).mean()

    model, x = Inverse(), -torch.ones(2, 4)
    assert torch.equal(compiled(model)(x), model(x))
    details = [d.detail for r in compile_ext.explain(model).rows for d in r.decisions]
    assert "it is in a branch that may not be taken, and can fail" in details


@torch.no_grad()
def test_prepare_leaves_no_second_copy() -> None:
    class Both(Padded):
        def forward(self, x: Tensor) -> Any:
            return F.linear(x, F.pad(self.w, (0, 4, 0, 3))) + (self.ballast * x.sum()).mean()

    model, x = Both(), torch.randn(3, 8)
    assert compile_ext.prepare(model, x) == {"w": "re-homed"}
    assert torch.equal(compiled(model)(x), model(x))
    (kinds,) = {row.constants for row in compile_ext.explain(model).rows}
    assert kinds == ("re-homed: the parameter lives in it",)
    from compile_ext.derived import _SHARED

    held = [c for table in _SHARED.values() for c in table._constants.values()]
    mine = [c for c in held if any(r() is model.w for r in c.sources)]
    assert [c.kind for c in mine] == ["re-homed: the parameter lives in it"]


def test_a_child_that_keeps_its_parent() -> None:
    class Child(Padded):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent = [parent]

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child(self)

        def forward(self, x: Tensor) -> Any:
            return self.child(x)

    model = Parent()
    with torch.no_grad():
        call = compiled(model)
        call(torch.randn(3, 4))
    assert [row.module for row in compile_ext.explain(call).rows] == ["child.w"]
    assert compile_ext.refresh(call) == 1
    assert compile_ext.restore(call) == 1


def test_a_variable_that_is_not_assigned_yet() -> None:
    def model(x: Tensor) -> Any:
        return later(x)

    with pytest.raises(compile_ext.CompileExtError, match="without tensors"):
        compile_ext.refresh(model)
    later = Padded()
    with torch.no_grad():
        compiled(model)(torch.randn(3, 4))
    assert [row.module for row in compile_ext.explain(model).rows] == ["later.w"]


@pytest.mark.parametrize("act", [compile_ext.refresh, compile_ext.restore])
@pytest.mark.parametrize("what", [None, 3, [Padded()], nn.Linear], ids=str)
def test_nothing_to_refresh_is_an_error(act: Any, what: Any) -> None:
    with pytest.raises(compile_ext.CompileExtError, match="without tensors"):
        act(what)


@torch.no_grad()
def test_explain_does_not_say_what_was_so_before() -> None:
    model, x = Padded(), torch.randn(3, 4)
    call = compiled(model)
    call(x)
    assert compile_ext.restore(call) == 1
    (row,) = compile_ext.explain(call).rows
    assert row.constants == ("stale: the next call makes it anew",)
    call(x)
    (row,) = compile_ext.explain(call).rows
    assert row.constants == ("re-homed: the parameter lives in it",)
