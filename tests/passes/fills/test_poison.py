"""``compile_ext.poison``: what is stripped is NaN or 0xFF, so that a false contract shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

from compile_ext.ops.errors import CheckError
from compile_ext.passes.derivation.uninitialised import poison_byte

PASS = "strip_placeholder_fills"
GONE = (True, "out is overwritten in full: what filled it is gone")
ops = torch.ops.compile_ext_tests
fills = torch.ops.compile_ext_fills

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.int8, torch.uint8, torch.int64, torch.bool),
)


def compiled(
    model: Any, *args: Tensor, inner: str = "eager", poison: bool = True, check: bool = False
) -> Any:
    own = {
        "compile_ext.inner": inner,
        "compile_ext.poison": poison,
        "compile_ext.check": check,
    }
    call = torch.compile(model, backend="compile_ext", options=own)
    with torch.no_grad():
        return call(*args)


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def unread(x: Tensor) -> Tensor:
    return fills.peeks(x, torch.zeros_like(x))


def overwritten(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    fills.peeks_out(x, out)
    return out


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("model", [unread, overwritten])
def test_every_dtype(seen: list[Tensor], inner: str, dynamic: bool, model: Any) -> None:
    for dtype in DTYPES:
        torch._dynamo.reset()
        x = torch.randn(5, 8).to(dtype)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        seen.clear()
        assert same(compiled(model, x, inner=inner), x)
        [given] = seen
        assert given.dtype == dtype
        assert given.shape == x.shape
        values = set(given.view(torch.uint8).flatten().tolist())
        # Where torch copies a bool, it makes it 1.
        copied_bool = dtype == torch.bool and 1 in values
        assert values == ({1} if copied_bool else {poison_byte(dtype)})
        if dtype.is_floating_point:
            assert given.float().isnan().all()


@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (3, 0, 2), (2, 3)])
def test_every_shape(seen: list[Tensor], shape: tuple[int, ...]) -> None:
    def model(x: Tensor) -> Tensor:
        return fills.peeks(x, torch.ones(shape, dtype=torch.bfloat16))

    x = torch.randn(5, 8)
    assert torch.equal(compiled(model, x), x)
    [given] = seen
    assert given.shape == shape
    assert given.isnan().all()


@pytest.mark.parametrize("strides", [(1, 5), (0, 1), (0, 0), (16, 2)])
def test_every_layout(seen: list[Tensor], strides: tuple[int, int]) -> None:
    def model(x: Tensor) -> Tensor:
        return fills.peeks(x, torch.zeros(80).as_strided((5, 8), strides))

    compiled(model, torch.randn(5, 8))
    [given] = seen
    assert given.stride() == strides
    assert given.isnan().all()


LIES = {
    "unread": lambda x: fills.lies(x, x.new_ones(1)),
    "unread, symbolic": lambda x: fills.lies(x, torch.ones_like(x)),
    "unread, of one reader in two": lambda x: (
        s := torch.ones(1),
        fills.lies(x, s) + fills.reads(x, s),
    )[1],
    "optional": lambda x: fills.lies_optional(x, x.new_ones(1)),
    "overwritten, and read": lambda x: (out := torch.zeros_like(x), fills.adds(x, out))[0],
    "overwritten, uninitialised": lambda x: (out := torch.empty_like(x), fills.adds(x, out))[0],
    "overwritten by half": lambda x: (out := torch.zeros_like(x), fills.half(x, out))[0],
}


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("model", LIES.values(), ids=LIES)
def test_false_contract_shows_nan(model: Any, dynamic: bool, inner: str) -> None:
    x = torch.randn(6, 8)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    assert compiled(model, x, inner=inner).isnan().any()


@pytest.mark.parametrize("given", ["parameter", "input"])
def test_what_none_replaces_is_poison(given: str) -> None:
    """Also where it is a parameter, or an input of the call: without poison it is None."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s = nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, x: Tensor, s: Tensor) -> Tensor:
            return fills.lies_optional(x, self.s if given == "parameter" else s)

    model, args = Model(), (torch.randn(5, 8), torch.ones(1))
    assert compiled(model, *args).isnan().all()
    torch._dynamo.reset()
    plain = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    assert torch.equal(plain(*args), args[0] + 1)


def filled(x: Tensor) -> tuple[Tensor, ...]:
    """True contracts, of every kind."""
    out, q, s = torch.zeros_like(x), torch.empty_like(x), x.new_full((x.shape[0], 1), 2.0)
    ops.copy_out(x, out)
    fills.quantize(out, q, s)
    y = fills.ignores(q, x.new_ones(1)) + fills.ignores(q, torch.ones_like(x))
    return y, out, q, s, fills.reads(x, torch.ones(1))


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("budget", [None, 0])
def test_true_contracts_give_the_same_bits(
    rewrite: Any, check: bool, dynamic: bool, budget: int | None
) -> None:
    x = torch.randn(5, 8)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    options = {
        "compile_ext.poison": True,
        "compile_ext.check": check,
        "compile_ext.memory_budget": budget,
    }
    got = rewrite(filled, x, options=options)
    assert [fired for fired, _ in got.of(PASS)].count(False) == (budget == 0)


def test_graph(rewrite: Any) -> None:
    got = rewrite(filled, torch.randn(5, 8), options={"compile_ext.poison": True})
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[5, 8]
arg1: float32[] = poison
arg2: float32[1] = poison
arg3: float32[5, 8] = poison
arg4: float32[1] = full(1)
%0: float32[5, 8] = empty([5, 8], device=cpu, dtype=float32)
%1: float32[5, 8] = .copy_(%0, arg1)
%2: float32[5, 8] = empty([5, 8], device=cpu, dtype=float32)
%3: float32[5, 8] = .copy_(%2, arg1)
%4: float32[5, 1] = empty([5, 1], device=cpu, dtype=float32)
%5: float32[5, 1] = .copy_(%4, arg1)
%6 = compile_ext_tests::copy_out(arg0, %1)
%7 = compile_ext_fills::quantize(%1, %3, %5)
%8: float32[5, 8] = compile_ext_fills::ignores(%3, arg2)
%9: float32[5, 8] = compile_ext_fills::ignores(%3, arg3)
%10: float32[5, 8] = add(%8, %9)
%11: float32[5, 8] = compile_ext_fills::reads(arg0, arg4)
return [%10, %1, %3, %5, %11]""",
    )


@pytest.mark.parametrize("poison", [False, True])
def test_check_finds_the_false_contract(poison: bool) -> None:
    def model(x: Tensor) -> Tensor:
        return fills.lies(x, torch.full((1,), 1e6))

    with pytest.raises(CheckError, match=r"compile_ext_fills::lies in .* wanted 1e\+06 as before"):
        compiled(model, torch.zeros(5, 8), check=True, poison=poison)


def test_check_finds_the_false_output() -> None:
    """Uninitialised memory may be zero: without poison nothing need show."""
    with pytest.raises(CheckError, match="found nan"):
        compiled(LIES["overwritten, and read"], torch.ones(5, 8), check=True)


def test_constants_are_no_poison(rewrite: Any) -> None:
    got = rewrite(
        lambda x: fills.reads(x, torch.ones(1)),
        torch.randn(5, 8),
        options={"compile_ext.poison": True},
    )
    assert got.of(PASS) == [(True, "full(1), which it is given, is a constant")]


def test_where_no_operand_can_be_handed_in(seen: list[Tensor]) -> None:
    def loop(x: Tensor) -> Tensor:
        def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, fills.peeks(y, y.new_ones(1)) + 1

        return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x))[1]

    x = torch.randn(5, 8)
    torch.testing.assert_close(compiled(loop, x), x + 1 + 1 + 1, rtol=0, atol=0)
    assert len(seen) == 3
    assert torch.cat(seen).isnan().all()


def test_poison_and_plain_side_by_side(seen: list[Tensor]) -> None:
    """Each compilation has its own buffer, whichever comes first."""
    x = torch.randn(5, 8)
    for poison in (True, False, True):
        torch._dynamo.reset()
        compiled(unread, x, poison=poison)
    assert [bool(s.isnan().all()) for s in seen][::2] == [True, True]
