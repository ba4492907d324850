"""The description of a call: what a kernel sees for every M, and why a call has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import compile_ext
from compile_ext.ops import router_gemm
from compile_ext.ops.call_site import CallSite, NotReachable, SizeValue, TensorForm

ops = torch.ops.compile_ext_tests
W = torch.randn(16, 8)


def collected(function: Callable[..., Any], *args: Any) -> compile_ext.Manifest:
    with torch.no_grad():
        return compile_ext.collect(function, *args)


def the_call(function: Callable[..., Any], *args: Any) -> CallSite:
    (site,) = collected(function, *args).sites
    return site.call


def the_reason(function: Callable[..., Any], *args: Any) -> str:
    manifest = collected(function, *args)
    assert manifest.sites == ()
    return manifest.not_covered[0].reason


def marked(x: Tensor, *dims: int, **ends: int) -> Tensor:
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim, **ends)
    return x


def gemm(x: Tensor) -> Tensor:
    return ops.gemm(x, W, None, None, False)


def test_static_sizes_are_numbers() -> None:
    assert the_call(gemm, torch.randn(5, 8)) == CallSite(
        "compile_ext_tests::gemm.default",
        (5, 5),
        (
            ("x", TensorForm("float32", (5, 8), (8, 1))),
            ("w", TensorForm("float32", (16, 8), (8, 1))),
            ("scale", None),
            ("bias", None),
            ("quantized", False),
        ),
        n=16,
        k=8,
    )


@pytest.mark.parametrize(
    ("ends", "m"),
    [({}, (2, None)), ({"min": 2, "max": 512}, (2, 512)), ({"min": 64, "max": 4096}, (64, 4096))],
)
def test_the_range_of_a_marked_size(ends: dict[str, int], m: Any) -> None:
    call = the_call(gemm, marked(torch.randn(64, 8), 0, **ends))
    assert (call.m, call.argument("x").shape) == (m, ("M", 8))


def test_an_unbacked_size_starts_at_one() -> None:
    x = torch.randn(5, 8)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    call = the_call(gemm, x)
    assert (call.m, call.argument("x")) == ((1, None), TensorForm("float32", ("M", 8), (8, 1)))


def test_no_tokens() -> None:
    assert the_call(gemm, torch.randn(0, 8)).m == (0, 0)


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], TensorForm]] = {
    "contiguous": (lambda x: x, TensorForm("float32", ("M", 8), (8, 1))),
    "rows of a wider tensor": (
        lambda x: F.pad(x, (0, 4))[..., :8],
        TensorForm("float32", ("M", 8), (12, 1)),
    ),
    "transposed: reshape copies": (
        lambda x: x.transpose(0, 1),
        TensorForm("float32", ("M", 8), (8, 1)),
    ),
}


@pytest.mark.parametrize(("view", "form"), NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("dims", [(0, 1), (1,)])
def test_batch_and_sequence_are_rows(
    view: Callable[[Tensor], Tensor], form: TensorForm, dims: tuple[int, ...]
) -> None:
    x = marked(torch.randn(3, 5, 8), *dims)
    call = the_call(lambda x: ops.gemm_fp8(view(x), W, torch.ones(1)), x)
    assert call.argument("x") == form
    assert call.m == ((4, None) if dims == (0, 1) else (6, None))


def test_rows_that_other_arguments_share() -> None:
    def scaled(x: Tensor) -> Tensor:
        return ops.gemm_fp8(x, W, x.amax(-1, keepdim=True))

    call = the_call(scaled, marked(torch.randn(3, 5, 8), 0, 1))
    assert call.argument("x") == TensorForm("float32", ("M", 8), (8, 1))
    assert call.argument("scale") == TensorForm("float32", ("M", 1), (1, 1))


def test_rows_that_another_argument_has_elsewhere() -> None:
    def scaled(x: Tensor) -> Tensor:
        return ops.gemm_fp8(x, W, x.new_ones(2, *x.shape[:-1], 1))

    call = the_call(scaled, marked(torch.randn(3, 5, 8), 0, 1))
    assert call.argument("x") == TensorForm("float32", (1, "M", 8), ("8*M", 8, 1))
    assert call.argument("scale").shape == (2, 1, "M", 1)


def test_a_batch_of_a_fixed_size_fits_some_m_only() -> None:
    def bmm(x: Tensor) -> Tensor:  # [m, h, k]
        return ops.bmm(x.flatten(0, 1), torch.ones(2, 16, 8))

    call = the_call(bmm, marked(torch.randn(3, 5, 2, 8), 1))
    assert call.m == (6, None)
    assert call.argument("x") == TensorForm("float32", ("M", 2, 8), (16, 8, 1))
    call = the_call(lambda x: ops.gemm(x[: x.shape[0] // 2], W, None, None, False), _rows())
    assert call.argument("x") == TensorForm("float32", ("M", 8), (8, 1))


def _rows() -> Tensor:
    return marked(torch.randn(6, 8), 0)


def test_a_size_that_only_some_m_have() -> None:
    def two(x: Tensor) -> Tensor:
        return ops.gemm(torch.cat((x, x)), x, None, None, False)

    call = the_call(two, _rows())
    assert call.m == (4, None)
    assert call.argument("w").shape == ("(M/2)", 8)
    assert call.make(6, "meta")["w"].shape == (3, 8)
    with pytest.raises(NotReachable):
        call.make(7, "meta")
    assert (call.n, call.k) == (None, 8)


def test_one_row_more() -> None:
    def more(x: Tensor) -> Tensor:
        return ops.gemm(F.pad(x, (0, 0, 0, 1)), x, None, None, False)

    call = the_call(more, _rows())
    assert call.m == (3, None)
    assert call.argument("w").shape == ("(M - 1)", 8)
    assert call.make(6, "meta")["w"].shape == (5, 8)


def test_scales_with_padded_columns() -> None:
    def fp8(x: Tensor) -> Tensor:
        scale = torch.empty_strided((x.shape[0], 1), (1, (x.shape[0] + 3) // 4 * 4))
        return ops.gemm(x, W, scale, None, True)

    form = the_call(fp8, _rows()).argument("scale")
    for m in (2, 3, 4, 5, 1023):
        assert form.make(m, "meta").stride() == (1, (m + 3) // 4 * 4)


def test_a_view_tells_its_alignment_and_no_more() -> None:
    experts = torch.randn(3, 16, 8)  # an expert begins at a multiple of 64 bytes

    def each(x: Tensor) -> Any:
        return [ops.gemm(x, experts[i], None, None, False) for i in range(3)]

    assert the_call(each, torch.randn(5, 8)).argument("w").offset == 0

    flat = torch.randn(200)

    def odd(x: Tensor) -> Tensor:
        return ops.gemm(x, flat[19:147].view(16, 8), None, None, False)

    assert the_call(odd, torch.randn(5, 8)).argument("w").offset == 3


def test_what_pins_and_prefetches_is_of_the_call() -> None:
    x, w = torch.randn(5, 8).bfloat16(), torch.randn(16, 8).bfloat16()

    def pinned(x: Tensor) -> Tensor:
        return torch.ops.compile_ext.router_gemm(x, w, None, pinned="reference")

    call = the_call(pinned, x)
    assert (call.argument("pinned"), call.argument("prefetch")) == ("reference", False)


def test_rows_of_sizes_from_data_lie_as_those_of_others() -> None:
    """Their strides are of ``Max(1, s)``: no reason to take them for rows that do not fit."""

    def cut(x: Tensor) -> Any:
        return router_gemm(torch.cat([x, x[..., :3]], -1)[..., :8], W.bfloat16())

    x = torch.randn(3, 5, 8).bfloat16()
    backed = the_call(cut, marked(x.clone(), 0, 1)).argument("a")
    torch._dynamo.reset()  # of the graph of the other call
    for dim in (0, 1):
        torch._dynamo.decorators.mark_unbacked(x, dim)
    assert the_call(cut, x).argument("a") == backed
    assert backed == TensorForm("bfloat16", ("M", 8), (11, 1))


def test_sizes_and_numbers_among_the_arguments() -> None:
    def mixed(x: Tensor) -> Tensor:
        return ops.mixed(x, [x.shape[0], 3], 0.5, torch.bfloat16, "text")

    call = the_call(mixed, _rows())
    assert [v for _, v in call.arguments[1:]] == [
        (SizeValue("M"), 3),
        0.5,
        torch.bfloat16,
        "text",
    ]
    assert call.make(7, "meta")["sizes"] == [7, 3]


REASONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a size of its own": (
        lambda x: ops.gemm(torch.ones(5, 8), x, None, None, False),
        "a size of it does not follow from M alone",
    ),
    "a size in a square": (
        lambda x: ops.gemm(x, torch.ones(x.shape[0] ** 2, 8), None, None, False),
        r"a size of it is M\*\*2, which is no sum or product",
    ),
    "a number that is none": (
        lambda x: ops.mixed(x, [1, 3], float("inf"), torch.bfloat16, "text"),
        "factor is inf",
    ),
}


@pytest.mark.parametrize(("function", "reason"), REASONS.values(), ids=REASONS)
def test_not_covered(function: Callable[[Tensor], Any], reason: str) -> None:
    assert re.fullmatch(reason, the_reason(function, _rows()))
