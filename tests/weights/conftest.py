"""Fixtures of the weight tests: models that are compiled and compared, constants that are kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library, register_fake

import compile_ext
from compile_ext.derived import Constants
from compile_ext.layers import ChannelFp8Linear
from compile_ext.passes.derivation import Padding
from compile_ext.report import Row

HOMED = "re-homed: the parameter lives in it"

_LIBRARY = Library("compile_ext_weights", "DEF")
_LIBRARY.define("gemm(Tensor x, Tensor w) -> Tensor")
_LIBRARY.impl("gemm", lambda x, w: x @ w.t(), "CompositeExplicitAutograd")
register_fake("compile_ext_weights::gemm", lambda x, w: x.new_empty(len(x), len(w)), lib=_LIBRARY)
compile_ext.register_contract(
    torch.ops.compile_ext_weights.gemm.default,
    compile_ext.OpContract(
        gemm=compile_ext.Gemm(a="x", b="w"), align={"n": compile_ext.Align(8, pad={"w": 0})}
    ),
)


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# ---- models, compiled ----------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["rehome", "copy"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"compile_ext.rehome": request.param}


@pytest.fixture
def new_model() -> Callable[[], nn.Sequential]:
    """Two FP8 layers: N is padded in the first (50 -> 64: re-homed), K in the second (a copy)."""
    return lambda: nn.Sequential(
        ChannelFp8Linear(torch.randn(50, 64) / 8, torch.randn(50)),
        ChannelFp8Linear(torch.randn(64, 50) / 8, torch.randn(64)),
    )


@pytest.fixture
def model(new_model: Callable[[], nn.Sequential]) -> nn.Sequential:
    return new_model()


@pytest.fixture
def x() -> Tensor:
    """Five tokens for ``model``."""
    return torch.randn(5, 64).bfloat16()


class OneWeight(nn.Module):
    """``run(x, w)`` of one parameter."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], w: Tensor) -> None:
        super().__init__()
        self.run, self.w = run, nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.w)


@pytest.fixture
def one_weight() -> type[OneWeight]:
    """``(run, w)``; ``torch.ops.compile_ext_weights.gemm`` as run wants N in multiples of 8."""
    return OneWeight


@pytest.fixture
def compile_it() -> Callable[..., Any]:
    """``(model, options)``, with inner eager unless the options say otherwise."""

    def compile_it(model: Any, options: dict[str, Any] | None = None) -> Any:
        every = {"compile_ext.inner": "eager", **(options or {})}
        return torch.compile(model, backend="compile_ext", options=every)

    return compile_it


@pytest.fixture
def assert_same() -> Callable[..., Tensor]:
    """``(compiled, model, x)``: bit-equal results, which are returned.

    With inner eager both run the reference op, and zeros are all that K gains.
    """

    def check(compiled: Any, model: Any, x: Tensor) -> Tensor:
        got, want = compiled(x), model(x)
        assert got.shape == want.shape
        assert torch.equal(got, want)
        return got.clone()

    return check


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """``(compiled, model, x)``, of GEMMs in float32 with K = 16."""

    def check(compiled: Any, model: Any, x: Tensor) -> None:
        # A row of the result may be summed in another order where the matrix has more columns: 16
        # products and sums of values up to 4, each rounded to 2^-24.
        torch.testing.assert_close(compiled(x), model(x), rtol=2**-20, atol=2**-16)

    return check


@pytest.fixture
def row_of() -> Callable[[Any, str], Row]:
    """``(model, module)``: the one row that ``explain`` has of a module."""

    def row_of(model: Any, module: str) -> Row:
        (row,) = (r for r in compile_ext.explain(model).rows if r.module == module)
        return row

    return row_of


# ---- constants and homes -------------------------------------------------------------------------


@pytest.fixture
def memory() -> Callable[[Tensor], tuple[int, int]]:
    """Address and bytes of a tensor's storage."""
    return lambda x: (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())


@pytest.fixture
def table() -> Constants:
    """Pads [6, 8] to [8, 8], with fives."""
    return Constants(Padding((0, 0, 0, 2), 5.0))


@pytest.fixture
def assert_kept() -> Callable[..., Tensor]:
    """``(table, p, kind)``: the constant of p, which is right, kept in the way that ``kind`` says;
    p itself is unchanged."""

    def check(table: Constants, p: Tensor, kind: str) -> Tensor:
        want, size = F.pad(p.detach(), (0, 0, 0, 2), value=5.0), p.shape
        constant = table.of([p])
        assert constant.value is not None
        assert torch.equal(constant.value, want)
        assert constant.kind == kind
        assert p.shape == size
        assert torch.equal(p, want[: len(p)])
        assert (p.data_ptr() == constant.value.data_ptr()) == (kind == HOMED)
        if kind == HOMED:  # what saves or copies storages does not see the pad
            assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
        return constant.value

    return check


@pytest.fixture
def homed(table: Constants, assert_kept: Callable[..., Tensor]) -> tuple[nn.Parameter, Tensor]:
    """A parameter that ``table`` has re-homed, and the constant."""
    p = nn.Parameter(torch.randn(6, 8))
    return p, assert_kept(table, p, HOMED)


@pytest.fixture
def in_four_threads() -> Callable[[Callable[[], None]], None]:
    """Run a function in four threads at once."""

    def run(function: Callable[[], None]) -> None:
        threads = [threading.Thread(target=function) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    return run
