"""fold_weight_padding gives a kernel weights whose address and strides it can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


STRIDES = "w: its strides are {}: fit(strides % 8, address % 16)"
ADDRESS = "w: its address may be any: fit(strides % 8, address % 16)"
TAKES: dict[str, tuple[Callable[[Tensor], Tensor], int, str]] = {  # take, k of the fused weight
    "columns": (lambda w: w[1:, 3:], 16, ADDRESS),
    "rows of 9": (lambda w: w[1:], 9, STRIDES.format((9, 1))),
    "all rows of 9": (lambda w: w[:8], 9, STRIDES.format((9, 1))),
    "narrow": (lambda w: w.narrow(0, 1, 8)[:, 1:9], 16, ADDRESS),
    "chunk": (lambda w: w[1:].chunk(2, 1)[1], 12, STRIDES.format((12, 1))),
    "transposed": (lambda w: w[:, :8].t(), 12, STRIDES.format((1, 12))),
}


@pytest.mark.parametrize(("take", "k", "detail"), TAKES.values(), ids=TAKES)
def test_misfit_is_copied_once(rewrite: Any, take: Any, k: int, detail: str) -> None:
    model, x = Fused(take, 9, k), torch.randn(5, 16)
    got = rewrite(model, x, tolerance=ROUNDING, options=ROOMY)
    assert detail in [text for is_fired, text in got.of(PASS) if is_fired]
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
arg1: float32[5, 16]
arg2: float32[8, 13] = getitem then fit(strides % 8, address % 16)
%0: float32[5, 13] = getitem(arg1, [slice(None, None, None), slice(None, 13, None)])
%1: float32[5, 8] = compile_ext_tests::gemm_memory(%0, arg2, None)
return [%1]""",
    )


def test_a_bias_that_begins_anywhere(rewrite: Any) -> None:
    class Biased(Fused):
        def forward(self, x: Tensor) -> Any:
            return ops.gemm_memory(x, self.w, self.bias[3:11])

    model, x = Biased(lambda w: w, n=8), torch.randn(5, 16)
    got = rewrite(model, x, tolerance=ROUNDING, options=ROOMY)
    assert got.of(PASS)[-1] == (True, "bias: its address may be any: fit(address % 16)")
    [(_, bias)] = seen_by_the_op(model, x)
    assert bias.data_ptr() % 16 == 0
    assert torch.equal(bias, model.bias[3:11])


def test_a_batch_of_weights(rewrite: Any) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 6, 9))

        def forward(self, x: Tensor) -> Any:
            return ops.bmm(x, self.w)

    got = rewrite(Heads(), torch.randn(5, 3, 9), options=ROOMY)
    detail = "w: its strides are (54, 9, 1): fit(strides % 8)"
    assert got.of(PASS) == [(False, "w is not a matrix"), (True, detail)]
    assert "float32[3, 6, 9] = fit(strides % 8)" in got.graph


def test_a_weight_that_fits_is_handed_over_itself() -> None:
    model, x = Fused(lambda w: w, n=8), torch.randn(5, 16)
    [(w, _)] = seen_by_the_op(model, x)
    assert w.data_ptr() == model.w.data_ptr()
    (row,) = compile_ext.explain(model).rows
    assert row.constants == ("the parameter itself: it fits",)


def test_layers_of_one_graph_lie_at_other_addresses() -> None:
    """Dynamo guards no address: what is right for the first layer need not be for the second."""
    memory, x, seen = torch.randn(16 * 8 * 2 + 1), torch.randn(5, 16), []

    def look(x: Tensor, w: Tensor, bias: Any) -> Tensor:
        seen.append(w)
        return x @ w.t()

    layers = [Fused(lambda w: w, n=8) for _ in range(3)]
    for i, layer in enumerate(layers[:2]):  # floats 0.. and 129..: addresses % 16 of 0 and 4
        layer.w.data = memory[i * 129 : i * 129 + 128].view(8, 16)
    with torch.library._scoped_library("compile_ext_tests", "IMPL") as library, torch.no_grad():
        library.impl("gemm_memory", look, "CPU")
        for layer in layers:
            layer.compile(backend="compile_ext", options={"compile_ext.inner": "eager"})
            assert torch.equal(layer(x), x @ layer.w.t())
        assert all(map(fits, seen))
        memory.mul_(2)  # both live in it: written in place behind the parameters
        compile_ext.refresh(layers[1])
        for layer in layers:
            assert torch.equal(layer(x), x @ layer.w.t())
    homes = [w.data_ptr() == layer.w.data_ptr() for w, layer in zip(seen, layers, strict=False)]
    assert homes == [True, False, True]


def test_one_row_has_no_stride() -> None:
    assert Restride(8).fits_strides(torch.randn(2, 9)[:1])
    assert not Restride(8).fits_strides(torch.randn(2, 9))


def test_not_beyond_the_budget(rewrite: Any) -> None:
    got = rewrite(
        Fused(lambda w: w[1:, 3:]),
        torch.randn(5, 16),
        tolerance=ROUNDING,
        options={"compile_ext.memory_budget": 0},
    )
    assert got.of(PASS)[-1] == (
        False,
        "w: its address may be any, and it would take 416 bytes, and 0 of 0 are left"
        " (compile_ext.memory_budget)",
    )


def test_not_a_weight_that_the_graph_writes(rewrite: Any) -> None:
    class Writes(Fused):
        def forward(self, x: Tensor) -> Any:
            self.w[0].zero_()
            return super().forward(x)

    got = rewrite(Writes(lambda w: w[1:, 3:]), torch.randn(5, 16), tolerance=ROUNDING)
    assert got.of(PASS)[-1] == (False, "w: its address may be any, and the graph writes it")


def test_not_an_input_of_the_call(rewrite: Any) -> None:
    def run(x: Tensor, w: Tensor) -> Any:
        return ops.gemm_memory(x, w[1:, 3:], None)

    got = rewrite(run, torch.randn(5, 13), torch.randn(9, 16), tolerance=ROUNDING, options=ROOMY)
    assert got.of(PASS) == [(False, "N=8, K=13 need no padding")]


def test_padded_weight_whose_rows_are_odd(rewrite: Any) -> None:
    model, x = Fused(lambda w: w, n=6, k=9), torch.randn(5, 16)
    got = rewrite(model, x, tolerance=ROUNDING, options=ROOMY)
    assert [text for _, text in got.of(PASS)] == ["N 6 -> 8: w padded", STRIDES.format((9, 1))]
    [(w, _)] = seen_by_the_op(model, x)
    assert fits(w)


def test_second_padded_weight_whose_rows_are_odd() -> None:
    class Two(Fused):
        def __init__(self) -> None:
            super().__init__(lambda w: w, n=6, k=9)
            self.v = nn.Parameter(torch.randn(6, 9))

        def forward(self, x: Tensor) -> Any:
            x = x[:, :9]
            return ops.gemm_memory(x, self.w, None) + ops.gemm_memory(x, self.v, None)

    assert [fits(w) for w, _ in seen_by_the_op(Two(), torch.randn(5, 16))] == [True, True]


def test_padded_view_whose_rows_are_odd(rewrite: Any) -> None:
    model = Fused(lambda w: w[:6, :9], n=9, k=16)
    [(w, _)] = seen_by_the_op(model, torch.randn(5, 16))
    assert fits(w)


def test_computed_then_padded_then_copied() -> None:
    model = Fused(lambda w: w * 2, n=6, k=9)
    [(w, _)] = seen_by_the_op(model, torch.randn(5, 16))
    assert fits(w)
    assert torch.equal(w, F.pad(model.w * 2, (0, 0, 0, 2)))


def test_expanded_rows_stay_rows() -> None:
    made = Restride(8)(torch.randn(1, 5).expand(8, 5))
    assert made.stride() == (8, 1)
