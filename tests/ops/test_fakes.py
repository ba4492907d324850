"""Real against fake outputs of all ops, over random sizes and layouts, and with a symbolic M."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compile_ext.ops import (
    block_scaled_mm,
    fp8_bmm,
    grouped_block_scaled_mm,
    grouped_block_scaled_mm_masked,
    quantize_fp8_blocks,
    quantize_fp8_groups,
    quantize_fp8_per_token,
    router_gemm,
    router_gemm_m1,
    router_topk,
    scaled_mm,
)

FP8 = torch.float8_e4m3fn
OPS = torch.ops.compile_ext
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
# derandomize: the same examples in each run. No deadline: the first call loads half of torch.
SETTINGS = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EDGES = [0, 1, 2, 3, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300]
sizes = st.one_of(st.sampled_from(EDGES), st.integers(0, 300))
LAYOUTS = ["contiguous", "column_slice", "every_second_row", "expanded"]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """``x [m, k]``, or what is left of a row of it, as a view with contiguous rows."""
    m, k = x.shape
    match layout:
        case "column_slice":
            return x.new_zeros(m, k + 5)[:, 2 : k + 2]
        case "every_second_row":
            return x.new_zeros(2 * m, k)[::2]
        case "expanded":
            return x.new_zeros(1, k).expand(m, k)
    return x


@st.composite
def scaled_mm_calls(draw: st.DrawFn) -> tuple[Any, ...]:
    m, n, k = draw(sizes), draw(sizes), draw(sizes)
    forms = [lambda s: (), lambda s: (1,), lambda s: (1, 1), lambda s: (s,), lambda s: (s, 1)]
    return (
        laid_out(torch.zeros(m, k, dtype=FP8), draw(st.sampled_from(LAYOUTS))),
        laid_out(torch.zeros(n, k, dtype=FP8), draw(st.sampled_from(LAYOUTS))),
        torch.ones(draw(st.sampled_from(forms))(m)),
        torch.ones(draw(st.sampled_from(forms))(n)),
        draw(biases(n)),
        draw(st.sampled_from(FLOATS)),
    )


@st.composite
def block_scaled_mm_calls(draw: st.DrawFn) -> tuple[Any, ...]:
    m, n, k = draw(sizes), draw(sizes), draw(sizes)
    groups, blocks = -(-k // 128), -(-n // 128)
    dtype = draw(st.sampled_from([FP8, torch.bfloat16]))
    scale_a = draw(st.sampled_from([torch.ones(m, groups), torch.ones(groups, m).T]))
    if dtype == torch.bfloat16:
        scale_a = draw(st.sampled_from([None, torch.ones(1), scale_a]))
    return (
        laid_out(torch.zeros(m, k, dtype=dtype), draw(st.sampled_from(LAYOUTS))),
        laid_out(torch.zeros(n, k, dtype=FP8), draw(st.sampled_from(LAYOUTS))),
        scale_a,
        draw(st.sampled_from([torch.ones(blocks, groups), torch.ones(groups, blocks).T])),
        draw(biases(n)),
        draw(st.sampled_from(FLOATS)),
    )


@st.composite
def grouped_calls(draw: st.DrawFn, op: str) -> tuple[Any, ...]:
    """Of an op with a weight for each group or head."""
    g, m, n, k = draw(st.integers(0, 3)), draw(sizes), draw(sizes), draw(sizes)
    rows: tuple[int, ...]
    rows, rest = {
        "grouped_block_scaled_mm": ((m,), (torch.zeros(m, dtype=torch.int32),)),
        "grouped_block_scaled_mm_masked": ((g, m), (torch.zeros(g, dtype=torch.int32), 7)),
        "fp8_bmm": ((m, g), ()),
    }[op]

    def matrices(*lead: int) -> Tensor:
        whole = torch.zeros(torch.Size(lead).numel(), k, dtype=FP8)
        return laid_out(whole, draw(st.sampled_from(LAYOUTS))).unflatten(0, lead)

    def scales(*shape: int) -> Tensor:
        views = [torch.ones(shape), torch.ones(shape[::-1]).permute(*range(len(shape))[::-1])]
        return draw(st.sampled_from(views))

    scale_a, scale_b = scales(*rows, -(-k // 128)), scales(g, -(-n // 128), -(-k // 128))
    return matrices(*rows), matrices(g, n), scale_a, scale_b, *rest, draw(st.sampled_from(FLOATS))


@st.composite
def router_gemm_calls(draw: st.DrawFn, m1: bool = False) -> tuple[Any, ...]:
    small = st.integers(1, 1) if m1 else st.sampled_from([0, 1, 2, 3, 5, 17])
    lead, n, k = draw(st.lists(small, max_size=3)), draw(sizes), draw(sizes)
    a = torch.zeros(*lead, k, dtype=torch.bfloat16)
    order = draw(st.permutations(range(a.dim())))  # any strides: b may be transposed as well
    a = a.permute(order).contiguous().permute(sorted(range(a.dim()), key=order.__getitem__))
    b = torch.zeros(n, k, dtype=torch.bfloat16)
    return a, draw(st.sampled_from([b, b.T.contiguous().T])), draw(biases(n))


def biases(n: int) -> st.SearchStrategy[Tensor | None]:
    views = [torch.zeros(n), torch.zeros(2 * n)[::2]]
    return st.sampled_from([None, *(view.to(dtype) for view in views for dtype in FLOATS)])


def described(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.device.type


def assert_fake_is_real(op: Any, args: tuple[Any, ...]) -> None:
    real = op(*args)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args]
        fake = op(*fakes)
    assert described(fake) == described(real)
    # Meta tensors run the same code, without a mode around them.
    meta = op(*(x.to("meta") if isinstance(x, Tensor) else x for x in args))
    assert described(meta) == (*described(real)[:3], "meta")


@SETTINGS
@given(scaled_mm_calls())
def test_scaled_mm(args):
    assert_fake_is_real(OPS.scaled_mm.default, args)


@SETTINGS
@given(block_scaled_mm_calls())
def test_block_scaled_mm(args):
    assert_fake_is_real(OPS.block_scaled_mm.default, args)


@pytest.mark.parametrize(
    "op", ["grouped_block_scaled_mm", "grouped_block_scaled_mm_masked", "fp8_bmm"]
)
@SETTINGS
@given(data=st.data())
def test_grouped(op, data):
    assert_fake_is_real(getattr(OPS, op).default, data.draw(grouped_calls(op)))


@SETTINGS
@given(router_gemm_calls())
def test_router_gemm(args):
    assert_fake_is_real(OPS.router_gemm.default, args)


@SETTINGS
@given(router_gemm_calls(m1=True))
def test_router_gemm_m1(args):
    assert_fake_is_real(OPS.router_gemm_m1.default, args)


B = torch.linspace(-2, 2, 7 * 200).view(7, 200)
# Three: under dynamic=True a size that equals the first M, 2, would share its symbol.
EXPERTS = torch.stack([B, 1 - B, B / 2]).to(FP8)
CALLS: dict[str, Callable[[Tensor], Tensor]] = {  # one for each op and form of scale; x is bf16
    "scaled_mm_per_tensor": lambda x: scaled_mm(
        x.to(FP8), B.to(FP8), torch.ones(1), torch.ones(())
    ),
    "scaled_mm_per_token": lambda x: scaled_mm(
        *_interleave(quantize_fp8_per_token(x), quantize_fp8_per_token(B)), torch.ones(7)
    ),
    "block_scaled_mm": lambda x: block_scaled_mm(
        *_interleave(quantize_fp8_groups(x), quantize_fp8_blocks(B)), torch.ones(7)
    ),
    "block_scaled_mm_bf16": lambda x: block_scaled_mm(
        x, B.to(FP8), None, torch.ones(1, 2), None, torch.float32
    ),
    "grouped_block_scaled_mm": lambda x: grouped_block_scaled_mm(
        x.to(FP8), EXPERTS, x[:, :2].float(), torch.ones(3, 1, 2), x[:, 0].int()
    ),
    "grouped_block_scaled_mm_masked": lambda x: grouped_block_scaled_mm_masked(
        x.to(FP8).expand(3, -1, -1),
        EXPERTS,
        x[:, :2].float().expand(3, -1, -1),
        torch.ones(3, 1, 2),
        torch.tensor([1, 3, 0], dtype=torch.int32),
        x.shape[0] // 2 + 1,
    ).transpose(0, 1),
    "fp8_bmm": lambda x: fp8_bmm(
        x.to(FP8)[:, None].expand(-1, 3, -1),
        EXPERTS,
        x[:, None, :2].float().expand(-1, 3, -1),
        torch.ones(3, 1, 2),
    ),
    "router_gemm": lambda x: router_gemm(x, B.bfloat16(), torch.ones(7)),
    "router_topk": lambda x: router_topk(x[:, :50].float(), B[0, :50], top_k=7)[0],
    "router_gemm_3d": lambda x: router_gemm(x.unsqueeze(1), B.bfloat16()),
}


Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def _interleave(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Operands:
    return a[0], b[0], a[1], b[1]


def tokens(m: int) -> Tensor:
    return torch.randn(m, 200).bfloat16()


@pytest.mark.parametrize("how", ["dynamic", "mark_dynamic"])
@pytest.mark.parametrize("call", CALLS)
def test_one_graph_serves_every_m(call, how):
    graphs = []

    def count(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    function = CALLS[call]
    compiled = torch.compile(
        function, backend=count, fullgraph=True, dynamic=True if how == "dynamic" else None
    )
    for m in (2, 5, 17):
        x = tokens(m)
        if how == "mark_dynamic":  # an error if anything guards on M
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), function(x), rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize("call", CALLS)
def test_m_known_only_at_run_time(call):
    # The tokens of one expert: their number is data. A check that asked for it could not be traced.
    def function(x: Tensor, chosen: Tensor) -> Tensor:
        return CALLS[call](x[chosen.nonzero().flatten()])

    x, chosen = tokens(6), torch.tensor([1, 0, 1, 1, 0, 0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        for keep in (chosen, 1 - chosen, torch.zeros_like(chosen), torch.ones_like(chosen)):
            torch.testing.assert_close(compiled(x, keep), function(x, keep), rtol=0, atol=0)


# Outside of Dynamo, F.pad makes M static, so that this call takes a scale that is not computed.
OP_CALLS = {
    **CALLS,
    "block_scaled_mm": lambda x: block_scaled_mm(
        x.to(FP8), B.to(FP8), x[:, :2].float(), torch.ones(1, 2)
    ),
}


@pytest.mark.parametrize("call", OP_CALLS)
def test_symbolic_m_stays_a_symbol_and_is_not_guarded_on(call):
    env, real = ShapeEnv(), tokens(5)
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) as mode:
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        x = mode.from_tensor(real, symbolic_context=context)
        out = OP_CALLS[call](x)
    assert isinstance(out.shape[0], torch.SymInt)
    assert str(out.shape[0]) == str(x.shape[0])
    assert out.shape[-1] == 7
    assert [str(guard.expr) for guard in env.guards] == []


def test_m1_guards_on_one_token():
    def function(x: Tensor) -> Tensor:
        return router_gemm_m1(x, B.bfloat16())

    x = tokens(1)
    torch.testing.assert_close(
        torch.compile(function, backend="eager", fullgraph=True, dynamic=True)(x), function(x)
    )
    with pytest.raises(TorchDynamoException, match="wanted one token"):
        torch.compile(function, backend="eager", fullgraph=True, dynamic=True)(tokens(2))
