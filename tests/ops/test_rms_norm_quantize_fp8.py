"""rms_norm_quantize_fp8: what it stands for bit by bit, float64, edges, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compile_ext.ops import quantize_fp8_groups, rms_norm, rms_norm_quantize_fp8
from compile_ext.ops.errors import DeviceError, DtypeError, GradError, RankError, ShapeError

OVERLOAD = torch.ops.compile_ext.rms_norm_quantize_fp8.default
ADD = torch.ops.compile_ext.add_rms_norm_quantize_fp8.default
FP8 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(0, 130), (1, 1), (1, 128), (3, 5), (5, 129), (4, 300), (130, 127), (9, 256), (129, 1)]
EPS = 1e-6
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def data(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    # Magnitudes over three decades within a row, so that groups have scales of their own.
    return (torch.randn(shape) * torch.logspace(-2, 1, shape[-1])).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(
        g.dtype == w.dtype and g.stride() == w.stride() and torch.equal(bits(g), bits(w))
        for g, w in zip(got, want, strict=True)
    )


# ---- the norm, then the quantization -------------------------------------------------------------


@pytest.mark.parametrize("round_before_weight", [False, True])
@pytest.mark.parametrize("shape", [(1, 128), (5, 129), (9, 256), (3, 300)], ids=str)
@each_dtype
def test_equals_the_norm_and_the_quantization_bit_by_bit(shape, round_before_weight, dtype):
    x, w = data(shape, dtype), torch.randn(shape[1]).to(dtype)
    want = quantize_fp8_groups(rms_norm(x, w, EPS, round_before_weight))
    assert same_bits(rms_norm_quantize_fp8(x, w, EPS, round_before_weight), want)


def test_where_the_rounding_is_makes_a_difference():
    x, w = data((64, 256)), torch.randn(256).bfloat16()
    before, after = (rms_norm_quantize_fp8(x, w, EPS, flag) for flag in (True, False))
    assert not same_bits(before, after)


@each_dtype
def test_without_a_weight(dtype):
    x = data((7, 300), dtype)
    want = quantize_fp8_groups(F.rms_norm(x, (300,), None, EPS))
    for flag in (False, True):
        assert same_bits(rms_norm_quantize_fp8(x, None, EPS, flag), want)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_the_weight_may_have_another_dtype(weight_dtype):
    x, w = data((6, 256)), torch.randn(256).to(weight_dtype)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    for flag, scaled in ((False, wide), (True, wide.bfloat16().float())):
        want = quantize_fp8_groups((scaled * w.float()).bfloat16())
        assert same_bits(rms_norm_quantize_fp8(x, w, EPS, flag), want)


# ---- values and edges ----------------------------------------------------------------------------


@each_shape
@each_dtype
def test_stays_near_float64(shape, dtype):
    x, w = data(shape, dtype), (torch.randn(shape[1]) + 2).to(dtype)
    q, scale = rms_norm_quantize_fp8(x, w, EPS)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double()
    m, k = shape
    assert (q.shape, q.dtype) == (shape, FP8)
    assert (scale.shape, scale.stride()) == ((m, -(-k // 128)), (1, (m + 3) // 4 * 4))
    step = scale.double()[:, torch.arange(k) // 128]
    # Half a step of e4m3 is 2^-4 of the value, 2^-10 scales where it is subnormal. Before it, one
    # rounding to x's dtype; the float32 work (a mean of k squares) is far below 2^-12.
    dtype_eps = torch.finfo(dtype).eps / 2 + 2.0**-12
    bound = torch.maximum(exact.abs() * (2.0**-4 + dtype_eps), step * 2.0**-10)
    bound += exact.abs() * dtype_eps + torch.finfo(dtype).tiny
    assert ((q.double() * step - exact).abs() <= bound).all()


def test_zero_rows_give_zeros():
    x = data((5, 260))
    x[2] = 0
    q, scale = rms_norm_quantize_fp8(x, torch.ones(260), EPS)
    assert q[2].float().abs().sum() == 0
    assert (scale > 0).all()
    assert not q.float().isnan().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_nan_and_infinity_stay_in_their_row(bad):
    x = data((5, 260))
    want = rms_norm_quantize_fp8(x, None, EPS)
    x[2, 7] = bad
    q, scale = rms_norm_quantize_fp8(x, None, EPS)
    others = [0, 1, 3, 4]
    assert torch.equal(q[others].float(), want[0][others].float())
    assert torch.equal(scale[others], want[1][others])
    # inf * rsqrt(inf) is NaN, and so is its group; the rest of that row is divided by inf.
    assert (q[2].float() * scale[2][torch.arange(260) // 128]).isnan()[:128].all()


@each_dtype
def test_huge_and_denormal_values(dtype):
    info = torch.finfo(dtype)
    huge = min(info.max, 1e18)  # its square is finite in float32
    for value in (huge, info.tiny, info.tiny * info.eps):
        x = torch.full((2, 256), value, dtype=dtype)
        q, scale = rms_norm_quantize_fp8(x, None, 0.0)
        want = quantize_fp8_groups(rms_norm(x, None, 0.0))
        assert same_bits((q, scale), want)
    x = torch.full((2, 256), info.tiny, dtype=dtype)  # with an eps, it is what is left
    assert same_bits(rms_norm_quantize_fp8(x, None, EPS), quantize_fp8_groups(
        F.rms_norm(x, (256,), None, EPS)))  # fmt: skip


def test_strided_input_gives_the_same():
    wide = data((140, 300))
    for x in (wide[::2, 5:205], wide.T[:200], wide[:1].expand(9, 300)):
        got = rms_norm_quantize_fp8(x, None, EPS)
        # The order of a sum follows the strides, so the mean may differ in its last bit.
        want = rms_norm_quantize_fp8(x.contiguous(), None, EPS)
        assert [t.stride() for t in got] == [t.stride() for t in want]
        assert (got[0].float() != want[0].float()).float().mean() < 0.01
        torch.testing.assert_close(got[1], want[1], rtol=2.0**-7, atol=0)


def test_no_tokens():
    q, scale = rms_norm_quantize_fp8(torch.ones(0, 256).bfloat16(), torch.ones(256))
    assert (q.shape, scale.shape, scale.stride()) == ((0, 256), (0, 2), (1, 0))


# ---- as an op ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 130), (1, 128), (5, 129), (4, 300)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), zip(DTYPES, (None, *DTYPES[1:]), strict=True), ids=str
)
def test_opcheck(shape, weight_dtype, dtype, opcheck):
    w = None if weight_dtype is None else torch.randn(shape[1]).to(weight_dtype)
    for x in (data(shape, dtype), data(shape[::-1], dtype).T, data((1, 600), dtype)[:, 2:514:2]):
        at = None if w is None else w.repeat(3)[: x.shape[1]]
        opcheck(OVERLOAD, (x, at, EPS, True))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_to_one_graph_with_the_same_bits(dynamic):
    compiled = torch.compile(
        rms_norm_quantize_fp8, backend="eager", fullgraph=True, dynamic=dynamic
    )
    for m in (3, 6):
        args = data((m, 200)), torch.randn(200), EPS
        assert same_bits(compiled(*args), rms_norm_quantize_fp8(*args))


def test_symbolic_m_stays_a_symbol_and_is_not_guarded_on():
    env, real = ShapeEnv(), data((5, 200))
    with FakeTensorMode(shape_env=env, allow_non_fake_inputs=True) as mode:
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        x = mode.from_tensor(real, symbolic_context=context)
        outs = (*OVERLOAD(x, None, EPS, False), *ADD(x, x, torch.ones(200), EPS, False))
    assert [str(out.shape[0]) for out in outs] == [str(x.shape[0])] * 5
    assert [out.shape[1] for out in outs] == [200, 2, 200, 2, 200]
    assert [str(guard.expr) for guard in env.guards] == []


def test_autocast_does_not_reach_the_reference():
    x, w = data((3, 256)), torch.randn(256)
    want = rms_norm_quantize_fp8(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(rms_norm_quantize_fp8(x, w), want)


def valid() -> dict[str, Any]:
    x = torch.ones(2, 32).bfloat16()
    return {"x": x, "weight": torch.ones(32), "eps": EPS, "round_before_weight": True}


BAD = {  # argument, value, error, found, wanted; the fix where it is not the usual one
    "x_int": ("x", torch.ones(2, 32).int(), DtypeError, "x of int32", "bfloat16 or float16"),
    "x_fp8": ("x", torch.ones(2, 32).to(FP8), DtypeError, "x of float8_e4m3fn", "or float32"),
    "x_double": ("x", torch.ones(2, 32).double(), DtypeError, "x of float64", "or float32"),
    "x_rank_1": ("x", torch.ones(32), RankError, "x of shape [32]", "2 dimensions"),
    "x_rank_3": ("x", torch.ones(1, 2, 32), RankError, "[1, 2, 32]", "2 dimensions"),
    "x_k_0": ("x", torch.ones(2, 0), ShapeError, "x of shape [2, 0]", "k >= 1", "pass a row"),
    "w_double": (
        "weight", torch.ones(32).double(), DtypeError, "weight of float64", "or float32"),
    "w_of_m": ("weight", torch.ones(2), ShapeError, "weight of shape [2]", "[32]"),
    "w_rank_2": ("weight", torch.ones(1, 32), ShapeError, "weight of shape [1, 32]", "[32]"),
    "w_meta": (
        "weight", torch.ones(32, device="meta"), DeviceError, "weight on meta", "one device"),
    "x_grad": ("x", torch.ones(2, 32).requires_grad_(), GradError, "x that", "gradient"),
    "w_grad": ("weight", torch.ones(32).requires_grad_(), GradError, "weight that", "gradient"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses(case, assert_refused):
    assert_refused(rms_norm_quantize_fp8, valid(), BAD[case])


def test_the_valid_call_of_the_refusals_is_valid():
    q, scale = rms_norm_quantize_fp8(**valid())
    assert q.float().tolist() == [[448.0] * 32] * 2
    assert scale.shape == (2, 1)
