"""fold_weight_padding gives a kernel weights whose address and strides it can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import compile_ext
from compile_ext.passes.derivation import Restride

PASS = "fold_weight_padding"
ROOMY = {"compile_ext.memory_budget": 2**20}
ROUNDING = 1e-5  # sums of 16 products of size ~3: some units of 2^-23 * 16
ops = torch.ops.compile_ext_tests


class Fused(nn.Module):
    """A fused weight [n, k]; ``take`` gives the part that the GEMM reads."""

    def __init__(self, take: Callable[[Tensor], Tensor], n: int = 9, k: int = 16) -> None:
        super().__init__()
        self.take = take
        self.w = nn.Parameter(torch.randn(n, k))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Any:
        w = self.take(self.w)
        return ops.gemm_memory(x[:, : w.shape[1]], w, None)


def fits(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and all(s == 1 or s % 8 == 0 for s in x.stride())


def seen_by_the_op(model: Any, *args: Any, **options: Any) -> list[tuple[Tensor, ...]]:
    """What the kernel is given: (w, bias) of each call."""
    seen = []

    def look(x: Tensor, w: Tensor, bias: Any) -> Tensor:
        seen.append((w, bias))
        return x.new_empty(x.shape[0], w.shape[0])

    with torch.library._scoped_library("compile_ext_tests", "IMPL") as library, torch.no_grad():
        library.impl("gemm_memory", look, "CPU")
        options = {"compile_ext.inner": "eager", **ROOMY, **options}
        torch.compile(model, backend="compile_ext", options=options)(*args)
    return seen


TAKES: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {  # take, k of the fused weight
    "columns": (lambda w: w[1:, 3:], 16, "w: its address is no multiple of 16: copied"),
    "rows of 9": (lambda w: w[1:], 9, "w: stride 9 is no multiple of 8: copied"),
    "all rows of 9": (lambda w: w[:8], 9, "w: stride 9 is no multiple of 8: copied"),
    "narrow": (lambda w: w.narrow(0, 1, 8)[:, 1:9], 16, "address is no multiple of 16: copied"),
    "chunk": (lambda w: w[1:].chunk(2, 1)[1], 12, "stride 12 is no multiple of 8: copied"),
    "transposed": (lambda w: w[:, :8].t(), 12, "stride 12 is no multiple of 8: copied"),
}


@pytest.mark.parametrize(("take", "k", "detail"), TAKES.values(), ids=TAKES)
def test_misfit_is_copied_once(rewrite: Any, take: Any, k: int, detail: str) -> None:
    model, x = Fused(take, 9, k), torch.randn(5, 16)
    got = rewrite(model, x, tolerance=ROUNDING, options=ROOMY)
    fired = [text for is_fired, text in got.of(PASS) if is_fired]
    assert len(fired) == 1
    assert fired[0].endswith(detail)
    [(w, _)] = seen_by_the_op(model, x)
    assert fits(w)
    assert torch.equal(w, take(model.w))
    with torch.no_grad():
        model.w.mul_(2)
    [(w, _)] = seen_by_the_op(model, x)
    assert torch.equal(w, take(model.w))


def test_graph(rewrite: Any) -> None:
    got = rewrite(Fused(lambda w: w[1:, 3:]), torch.randn(5, 16), tolerance=ROUNDING, options=ROOMY)
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[9, 16]
arg1: float32[5, 16]
arg2: float32[8, 13] = getitem then copy with strides in multiples of 8
%0: float32[8, 13] = getitem(arg0, [slice(1, None, None), slice(3, None, None)])
%1: float32[5, 13] = getitem(arg1, [slice(None, None, None), slice(None, 13, None)])
%2: float32[5, 8] = compile_ext_tests::gemm_memory(%1, arg2, None)
return [%2]""",
    )


def test_a_bias_that_begins_anywhere(rewrite: Any) -> None:
    class Biased(Fused):
        def forward(self, x: Tensor) -> Any:
            return ops.gemm_memory(x, self.w, self.bias[3:11])

    model, x = Biased(lambda w: w, n=8), torch.randn(5, 16)
    got = rewrite(model, x, tolerance=ROUNDING, options=ROOMY)
    assert got.of(PASS)[-1] == (True, "bias: its address is no multiple of 16: copied")
    [(w, bias)] = seen_by_the_op(model, x)
    assert w is not None
    assert bias.data_ptr() % 16 == 0
    assert torch.equal(bias, model.bias[3:11])


@pytest.mark.parametrize(
    "take", [lambda w: w, lambda w: w[1:], lambda w: w[:8, 4:], lambda w: w[:4]]
)
def test_not_what_fits(rewrite: Any, take: Any) -> None:
    n = 9 if take(torch.empty(9, 16)).shape[0] == 8 else 8
    got = rewrite(Fused(take, n), torch.randn(5, 16), tolerance=ROUNDING, options=ROOMY)
    assert [fired for fired, _ in got.of(PASS)] == [False]  # no padding, and nothing about memory
    assert "derived" not in [x.name for x in got.modules[-1].graph.nodes]
    assert "copy with strides" not in got.graph


def test_one_row_has_no_stride(rewrite: Any) -> None:
    class Row(Fused):
        def forward(self, x: Tensor) -> Any:
            return ops.gemm_memory(x[:, :9], self.w, None)[:, :1]

    got = rewrite(Row(lambda w: w, n=1, k=9), torch.randn(5, 16), tolerance=ROUNDING, options=ROOMY)
    assert got.of(PASS)[0] == (True, "N 1 -> 4: w padded")


def test_not_beyond_the_budget(rewrite: Any) -> None:
    options = {"compile_ext.memory_budget": 0}
    got = rewrite(
        Fused(lambda w: w[1:, 3:]), torch.randn(5, 16), tolerance=ROUNDING, options=options
    )
    assert got.of(PASS)[-1] == (
        False,
        "w: its address is no multiple of 16, and it would take 416 bytes, and 0 of 0 are left"
        " (compile_ext.memory_budget)",
    )


def test_not_a_weight_that_the_graph_writes(rewrite: Any) -> None:
    class Writes(Fused):
        def forward(self, x: Tensor) -> Any:
            self.w[0].zero_()
            return super().forward(x)

    got = rewrite(Writes(lambda w: w[1:, 3:]), torch.randn(5, 16), tolerance=ROUNDING)
    assert got.of(PASS)[-1] == (
        False,
        "w: its address is no multiple of 16, and the graph writes it",
    )


def test_not_an_input_of_the_call(rewrite: Any) -> None:
    def run(x: Tensor, w: Tensor) -> Any:
        return ops.gemm_memory(x, w[1:, 3:], None)

    got = rewrite(run, torch.randn(5, 13), torch.randn(9, 16), tolerance=ROUNDING, options=ROOMY)
    assert got.of(PASS) == [(False, "N=8, K=13 need no padding")]


def test_explain_says_so() -> None:
    model = Fused(lambda w: w[1:, 3:])
    options = {"compile_ext.inner": "eager", **ROOMY}
    with torch.no_grad():
        compiled = torch.compile(model, backend="compile_ext", options=options)
        compiled(torch.randn(5, 16))
    text = str(compile_ext.explain(compiled))
    assert "* fold_weight_padding: w: its address is no multiple of 16: copied" in text


def test_padded_weight_whose_rows_are_odd(rewrite: Any) -> None:
    model, x = Fused(lambda w: w, n=6, k=9), torch.randn(5, 16)
    got = rewrite(model, x, tolerance=ROUNDING, options=ROOMY)
    assert [text for _, text in got.of(PASS)] == [
        "N 6 -> 8: w padded",
        "w: stride 9 is no multiple of 8: copied",
    ]
    [(w, _)] = seen_by_the_op(model, x)
    assert fits(w)


def test_second_padded_weight_whose_rows_are_odd(rewrite: Any) -> None:
    class Two(Fused):
        def forward(self, x: Tensor) -> Any:
            x = x[:, :9]
            return ops.gemm_memory(x, self.w, None) + ops.gemm_memory(x, self.w + 1, None)

        def __init__(self) -> None:
            super().__init__(lambda w: w, n=6, k=9)
            self.v = nn.Parameter(torch.randn(6, 9))

    class Same(Two):
        def forward(self, x: Tensor) -> Any:
            x = x[:, :9]
            return ops.gemm_memory(x, self.w, None) + ops.gemm_memory(x, self.v, None)

    assert all(fits(w) for w, _ in seen_by_the_op(Same(), torch.randn(5, 16)))


def test_padded_view_whose_rows_are_odd(rewrite: Any) -> None:
    model = Fused(lambda w: w[:6, :9], n=9, k=16)
    [(w, _)] = seen_by_the_op(model, torch.randn(5, 16))
    assert fits(w)


def test_computed_then_padded_then_copied(rewrite: Any) -> None:
    model = Fused(lambda w: w * 2, n=6, k=9)
    rewrite(model, torch.randn(5, 16), tolerance=ROUNDING, options=ROOMY)


def test_expanded_rows_stay_rows() -> None:
    made = Restride(8)(torch.randn(1, 5).expand(8, 5))
    assert made.stride() == (8, 1)


@pytest.mark.parametrize("shape", [(3, 5), (5,), (2, 3, 5), (1, 5), (3, 1)])
def test_restride(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape)
    made = Restride(8)(x)
    assert torch.equal(made, x)
    assert made.stride(-1) == 1 or shape[-1] == 1
    assert all(s % 8 == 0 for s, n in zip(made.stride()[:-1], shape[:-1], strict=True) if n > 1)
    column_major = Restride(8)(x.t()) if x.dim() == 2 else None
    assert column_major is None or torch.equal(column_major, x.t())
