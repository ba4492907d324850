"""On a CUDA device: stripped fills under Inductor and CUDA graphs, and poison in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library, register_fake

import compile_ext
from compile_ext.demo.kernels import count_kernels
from compile_ext.ops.errors import CaptureError

pytestmark = pytest.mark.gpu
OPS: Any = torch.ops.compile_ext_gpu_fills
GRAPHS: dict[str, Any] = {"mode": "reduce-overhead"}


def write_twice(x: Tensor, out: Tensor) -> None:
    torch.mul(x, 2, out=out)


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    library = Library("compile_ext_gpu_fills", "DEF")

    def define(schema: str, run: Any, fake: Any, **contract: Any) -> None:
        name = schema.split("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, run, "CompositeExplicitAutograd")
        register_fake(f"compile_ext_gpu_fills::{name}", fake, lib=library)
        compile_ext.register_contract(
            getattr(OPS, name).default, compile_ext.OpContract(**contract)
        )

    def like(x: Tensor, scale: Tensor) -> Tensor:
        return torch.empty_like(x)

    unread = {"unread": {"scale": lambda **_: True}}
    define("plain(Tensor x, Tensor scale) -> Tensor", lambda x, scale: x * 2, like, **unread)
    define(
        "liar(Tensor x, Tensor scale) -> Tensor", lambda x, scale: x * scale.float(), like, **unread
    )
    define("scaled(Tensor x, Tensor scale) -> Tensor", lambda x, scale: x * scale, like)
    define(
        "twice_out(Tensor x, Tensor(a!) out) -> ()",
        write_twice,
        lambda x, out: None,
        overwritten=("out",),
    )
    yield
    library._destroy()


def plain(x: Tensor) -> Tensor:
    for _ in range(3):
        x = OPS.plain(x, x.new_ones(1))
    return x


def scaled(x: Tensor) -> Tensor:
    for _ in range(3):
        x = OPS.scaled(x, torch.full((1,), 2.0, device=x.device))
    return x


@pytest.mark.parametrize("model", [plain, scaled])
@pytest.mark.parametrize("how", [{}, GRAPHS], ids=["", "CUDA graphs"])
def test_no_fill_is_launched(model: Any, how: dict[str, Any]) -> None:
    torch._dynamo.reset()
    with torch.inference_mode():
        x = torch.randn(64, device="cuda")
        compiled = torch.compile(model, backend="compile_ext", **how)
        for _ in range(4):  # CUDA graphs: warm-up, capture, replays
            x.normal_()
            assert torch.equal(compiled(x), x * 8)
        # The three ops; a replay copies its input first.
        assert count_kernels(lambda: compiled(x)) == 3 + bool(how)


def test_constants_survive_a_reset_of_the_allocator() -> None:
    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(scaled, backend="compile_ext", **GRAPHS)
        for _ in range(4):
            x = torch.randn(64, device="cuda")
            got = compiled(x).clone()
            torch.cuda.empty_cache()
            other = torch.full((1 << 20,), torch.nan, device="cuda")  # takes what was freed
            del other
            assert torch.equal(got, x * 8)


def test_overwritten_buffer() -> None:
    def model(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        OPS.twice_out(x, out)
        return out + 1

    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(model, backend="compile_ext")
        x = torch.randn(64, device="cuda")
        assert torch.equal(compiled(x), x * 2 + 1)
        assert count_kernels(lambda: compiled(x)) == 2  # x * 2, + 1


def test_first_call_inside_a_capture_says_so() -> None:
    torch._dynamo.reset()
    x = torch.randn(64, device="cuda")
    with torch.inference_mode():
        compiled = torch.compile(
            scaled, backend="compile_ext", options={"compile_ext.inner": "eager"}
        )
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        refused = pytest.raises(CaptureError, match="call the compiled model once")
        with refused, torch.cuda.graph(graph):
            compiled(x)
        torch.cuda.synchronize()
        compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        x.fill_(3.0)
        graph.replay()
        assert torch.equal(y, torch.full_like(x, 24.0))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool], ids=str
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "symbolic"])
def test_poison_reaches_who_reads_it(dtype: torch.dtype, dynamic: bool) -> None:
    def model(x: Tensor) -> Tensor:
        zeros = torch.zeros_like(x) if dynamic else x.new_zeros(1)
        return OPS.liar(x, zeros.to(dtype))

    torch._dynamo.reset()
    x = torch.randn(64, device="cuda").abs() + 1
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with torch.inference_mode():
        assert torch.equal(model(x), torch.zeros_like(x))
        compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.poison": True})
        if dtype.is_floating_point:
            assert bool(compiled(x).isnan().all())
        else:  # every bit: -1; of a bool, true
            assert torch.equal(compiled(x), x if dtype == torch.bool else -x)


def test_scaled_mm_of_torch_with_unit_scales() -> None:
    a = torch.randn(32, 64, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(48, 64, device="cuda").to(torch.float8_e4m3fn).t()

    def model(a: Tensor, b: Tensor) -> Tensor:
        one, other = torch.ones((), device="cuda"), torch.ones((), device="cuda")
        return torch._scaled_mm(a, b, scale_a=one, scale_b=other, out_dtype=torch.bfloat16)

    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(model, backend="compile_ext")
        assert torch.equal(compiled(a, b), model(a, b))
        assert count_kernels(lambda: compiled(a, b)) == 1
        (row,) = compile_ext.explain(compiled).rows
    assert row.site is not None
    assert (row.site.n, row.site.k) == (48, 64)
