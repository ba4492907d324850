"""The output of a padded GEMM is cut to N as a view where no reader can tell, else as a copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PASS = "fold_weight_padding"
ops = torch.ops.compile_ext_tests
# Sums of 8 products up to ~10, in another order, then squared by some readers.
ROUNDING = 1e-4


class Reader(nn.Module):
    """A GEMM with N = 6, padded to 8, whose output goes into ``read``."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.read = read
        self.w = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Any:
        return self.read(ops.gemm(x, self.w, None, None, False))


def one_tells(y: Tensor) -> Any:
    return y * 2, y.view(-1)


def inplace(y: Tensor) -> Tensor:
    y.add_(1)
    return y


def swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def in_cond(y: Tensor) -> Any:
    return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y - 1, (y,))


TELLS: dict[str, Callable[[Tensor], Any]] = {
    "empty_like": lambda y: torch.zeros_like(y) + y,
    "output": lambda y: y,
    "view": lambda y: y.view(-1) * 2,
    "as_strided": lambda y: y.as_strided((3, 2), (2, 1)),
    "torch.as_strided": lambda y: torch.as_strided(y, (3, 2), (2, 1)) + 1,
    "transposed output": lambda y: y.t(),
    "output in a tuple": lambda y: (y, y.t()),
    "opaque op": lambda y: ops.gemm(y, y, None, None, False),
    "in place": inplace,
    "one of two": one_tells,
    "cond": in_cond,
    "complex": lambda y: torch.view_as_complex(y.unflatten(1, (3, 2))).abs(),
    "slice of it returned": lambda y: y[:, 2:4],
}
CANNOT: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda y: y * 2,
    "activation": lambda y: F.gelu(y) + y.sigmoid(),
    "cast": lambda y: y.double(),
    "add of a transposed": lambda y: y + torch.arange(6.0 * y.shape[0]).view(6, -1).t(),
    "reduction": lambda y: y.sum(-1),
    "layer_norm": lambda y: F.layer_norm(y, (6,)),
    "linear": lambda y: F.linear(y, torch.ones(3, 6)),
    "mm": lambda y: y @ torch.ones(6, 3),
    "softmax": lambda y: y.softmax(-1),
    "slice, pointwise": lambda y: y[:, 2:4] * 2,
    "transposed, pointwise": lambda y: y.t() + 1,
    "cat": lambda y: torch.cat([y, y], -1),
    "clone": lambda y: y.clone(),
    "where": lambda y: torch.where(y > 0, y, 0.0),
    "reshape": lambda y: y.reshape(-1) + 1,
}
EITHER: dict[str, Callable[[Tensor], Any]] = {  # only the result is asserted
    "chunk, mul": swiglu,
    "contiguous": lambda y: y.contiguous(),
    "contiguous, view": lambda y: y.contiguous().view(-1),
    "reshape returned": lambda y: y.reshape(-1),
    "topk": lambda y: y.topk(2),
    "unfold": lambda y: y.unfold(1, 2, 2) * 2,
    "bits": lambda y: y.view(torch.int32) * 0,
    "flatten": lambda y: y.flatten(),
    "squeeze": lambda y: y.squeeze(0),
    "expand": lambda y: y[None].expand(2, -1, -1),
    "to itself": lambda y: y.float(),
    "detach": lambda y: y.detach(),
    "numpy-like index": lambda y: y[:, [0, 2]],
    "unsafe chunk": lambda y: torch.stack(y.unbind(1), 1),
}
ALL = {**TELLS, **CANNOT, **EITHER}


def is_copied(graph: str) -> bool:
    """Whether the cut (the first getitem with an ellipsis) is cloned."""
    name = next(line.split(":")[0].strip() for line in graph.splitlines() if "[Ellipsis," in line)
    return f".clone({name}, memory_format=contiguous_format)" in graph


def run_it(rewrite: Any, read: Any, m: int | str, inner: str) -> Any:
    x = torch.randn(5 if m == "dynamic" else int(m), 8)
    if m == "dynamic":
        torch._dynamo.mark_dynamic(x, 0)
    return rewrite(Reader(read), x, tolerance=ROUNDING, options={"compile_ext.inner": inner})


@pytest.mark.parametrize("m", [5, 1, "dynamic"])
@pytest.mark.parametrize("name", ALL)
def test_reader(rewrite: Any, name: str, m: int | str) -> None:
    got = run_it(rewrite, ALL[name], m, "eager")
    assert got.of(PASS)[0] == (True, "N 6 -> 8: w padded")
    if name not in EITHER:
        # One row: any stride is contiguous to a view, and to_copy and clone keep it.
        tells = {*TELLS, "cast", "clone"} - {"view"} if m == 1 else TELLS
        assert is_copied(got.graph) == (name in tells)


# One column: Inductor has strides of its own for it, which are not eager's.
ONE_COLUMN = ("transposed, pointwise", 1)


@pytest.mark.parametrize(
    ("name", "m"), [x for x in itertools.product(ALL, (5, 1)) if x != ONE_COLUMN]
)
def test_reader_with_inductor(rewrite: Any, name: str, m: int) -> None:
    assert run_it(rewrite, ALL[name], m, "inductor").of(PASS)[0][0]


@torch.no_grad()
def test_one_column_is_as_inductor_lays_it_out() -> None:
    name, m = ONE_COLUMN
    model, x = Reader(ALL[name]), torch.randn(m, 8)
    ours, theirs = (torch.compile(model, backend=b)(x) for b in ("compile_ext", "inductor"))
    assert ours.stride() == theirs.stride()
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, model(x), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_dynamic_m_serves_other_sizes(rewrite: Any, inner: str) -> None:
    model, x = Reader(lambda y: (y * 2).view(-1)), torch.randn(5, 8)
    torch._dynamo.mark_dynamic(x, 0)
    options: dict[str, Any] = {"compile_ext.inner": inner}
    got = rewrite(model, x, tolerance=ROUNDING, options=options)
    assert not is_copied(got.graph)
    compiled = torch.compile(model, backend="compile_ext", options=options)
    with torch.no_grad():
        for m in (2, 33):
            x = torch.randn(m, 8)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=ROUNDING)
    assert len(got.modules) == 1


def test_after_a_graph_break(rewrite: Any) -> None:
    def read(y: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return y.view(-1)

    got = rewrite(Reader(read), torch.randn(5, 8), tolerance=ROUNDING)
    assert len(got.modules) == 2
    assert got.of(PASS)[0][0]
