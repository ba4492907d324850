"""What counts as computed from parameters alone: spellings, storages that are filled, sharing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

PASS = "fold_parameter_math"
ROOMY = {"compile_ext.memory_budget": 2**20}  # far more than any result here


class Model(nn.Module):
    """Two weights, a positive vector, a buffer and a plain attribute, and what ``run`` does."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.w, self.v = (nn.Parameter(torch.randn(6, 8)) for _ in range(2))
        self.s = nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("b", torch.randn(6, 8))
        self.plain = torch.randn(6, 8)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def zeros_then_slice(w: Tensor) -> Tensor:
    buf = w.new_zeros(8, 8)
    buf[:6] = w
    return buf


def zeros_then_copy(w: Tensor) -> Tensor:
    buf = torch.zeros(8, 8)
    buf[:6].copy_(w)
    return buf


def empty_then_parts(m: Model) -> Tensor:
    buf = torch.empty(12, 8)
    top, bottom = buf.chunk(2)
    top.copy_(m.w)
    bottom.copy_(m.v)
    return buf


def interleaved(m: Model) -> Tensor:
    a, b = m.w.split(3)
    return torch.stack([a, b, *m.v.chunk(2)], dim=1).flatten(0, 1) * 2


def filled_twice(m: Model) -> Tensor:
    buf = m.w.new_empty(6, 8)
    buf.fill_(1.0)
    buf[::2] = m.v[::2]
    buf[1].zero_()
    return buf


def nested(m: Model) -> Tensor:
    def scaled(w: Tensor, by: Tensor) -> Tensor:
        return (lambda u: u * by)(w.contiguous())

    return scaled(m.w, 1 / m.s)


WEIGHTS: dict[str, Callable[[Any], Tensor]] = {
    "transposed copy": lambda m: m.w[:, :6].t().contiguous().t() @ m.v,
    "cast there and back": lambda m: m.w.bfloat16().float(),
    "to keyword": lambda m: m.w.to(dtype=torch.float64).to(torch.float32),
    "cat": lambda m: torch.cat([m.w, m.v]),
    "cat other order": lambda m: torch.cat([m.v, m.w]),
    "stack": lambda m: torch.stack([m.w, m.v]).sum(0),
    "reciprocal": lambda m: m.w * m.s.reciprocal(),
    "divided": lambda m: m.w / m.s,
    "cat with zeros": lambda m: torch.cat([m.w, m.w.new_zeros(2, 8)]),
    "zeros and slice": lambda m: zeros_then_slice(m.w),
    "zeros and copy_": lambda m: zeros_then_copy(m.w),
    "empty and two copies": empty_then_parts,
    "fill, slice, zero": filled_twice,
    "split, chunk, stack": interleaved,
    "one of several results": lambda m: m.w * m.w.max(dim=0)[0],
    "both of several results": lambda m: m.w * m.w.max(0).values + m.w.max(0).indices,
    "sorted": lambda m: m.w.sort(0).values,
    "gathered": lambda m: m.w.index_select(0, torch.arange(5, -1, -1)),
    "masked with infinity": lambda m: m.w.masked_fill(m.w < -9, float("-inf")),
    "bits": lambda m: m.w.view(torch.int32).bitwise_and(-8).view(torch.float32),
    "nested functions": nested,
    "buffer": lambda m: m.b * 2,
    "plain attribute": lambda m: m.plain * 2,
    "all kinds": lambda m: m.w + m.b + m.plain,
    "matmul of weights": lambda m: m.w @ m.v.t() @ m.v,
}
LEFT = {F.linear, "t", "t_", "view"}


def follow(got: Any, model: Model, *args: Any, options: Any = ROOMY) -> None:
    """The graph that is there gives eager's values also once every parameter has changed."""
    graphs = len(got.modules)
    compiled = torch.compile(
        model, backend="compile_ext", options={"compile_ext.inner": "eager", **options}
    )
    with torch.no_grad():
        for _ in range(2):
            changed: Any = (model.w, model.v, model.s, model.b, model.plain)
            for x in changed:
                x.mul_(1.5)
            want, result = model(*args), compiled(*args)
            torch.testing.assert_close(result, want, rtol=0, atol=0)  # the same kernels
    assert len(got.modules) == graphs


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_weight_is_computed_once(rewrite: Any, weight: Any) -> None:
    model, x = Model(lambda m, x: F.linear(x, weight(m))), torch.randn(5, 8)
    got = rewrite(model, x, options=ROOMY)
    fired = got.of(PASS)
    assert fired
    assert all(f for f, _ in fired)
    calls = [n for n in got.modules[-1].graph.nodes if n.op.startswith("call_")]
    assert {n.target for n in calls} <= LEFT
    follow(got, model, x)


def test_router_weight_in_float32(rewrite: Any) -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 8, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.float(), self.w.float())

    got = rewrite(Router(), torch.randn(5, 8).bfloat16(), options=ROOMY)
    assert got.of(PASS) == [(True, "float of a parameter is a derived constant")]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[5, 8]
arg2: float32[4, 8] = float
%0: float32[5, 8] = .float(arg0)
%1: float32[5, 4] = linear(%0, arg2)
return [%1]""",
    )


def test_one_result_with_several_readers(rewrite: Any) -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        w = m.w * 2
        return F.linear(x, w) + F.linear(x + 1, w).relu() + w.sum(1) * x.sum()

    model, x = Model(run), torch.randn(5, 8)
    got = rewrite(model, x, options=ROOMY)
    assert_expected_inline(
        got.graph,
        """\
arg1: float32[5, 8]
arg2: float32[6] = mul, sum
arg3: float32[6, 8] = mul
%0: float32[5, 6] = linear(arg1, arg3)
%1: float32[5, 8] = add(arg1, 1)
%2: float32[5, 6] = linear(%1, arg3)
%3: float32[5, 6] = .relu(%2)
%4: float32[5, 6] = add(%0, %3)
%5: float32[] = .sum(arg1)
%6: float32[6] = mul(arg2, %5)
%7: float32[5, 6] = add(%4, %6)
return [%7]""",
    )
    follow(got, model, x)


def test_one_result_feeds_another(rewrite: Any) -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        w = torch.cat([m.w, m.v])
        return F.linear(x, w) @ F.linear(x, w / m.s).t()

    model, x = Model(run), torch.randn(5, 8)
    got = rewrite(model, x, options=ROOMY)
    assert_expected_inline(
        got.graph,
        """\
arg2: float32[5, 8]
arg4: float32[12, 8] = cat
arg5: float32[12, 8] = cat, truediv
%0: float32[5, 12] = linear(arg2, arg4)
%1: float32[5, 12] = linear(arg2, arg5)
%2: float32[12, 5] = .t(%1)
%3: float32[5, 5] = matmul(%0, %2)
return [%3]""",
    )
    follow(got, model, x)


def test_an_earlier_state_of_a_buffer_feeds_another_result(rewrite: Any) -> None:
    def run(m: Model, x: Tensor) -> Tensor:
        buf = m.w.clone()
        first = buf * 2
        buf[:] = m.v
        return F.linear(x, first) + F.linear(x, buf)

    model, x = Model(run), torch.randn(5, 8)
    got = rewrite(model, x, options=ROOMY)
    assert got.of(PASS) == [
        (False, "it is read before it is complete"),
        (True, "clone, mul of a parameter is a derived constant"),
    ]
    follow(got, model, x)


@pytest.mark.parametrize("view", [lambda w: w.t().t(), lambda w: w.view(12, 4), lambda w: w[1:]])
def test_views_alone_are_no_candidate(rewrite: Any, view: Any) -> None:
    got = rewrite(Model(lambda m, x: x.sum() * view(m.w)), torch.randn(5, 8), options=ROOMY)
    assert got.of(PASS) == []


def test_casts_to_the_same_dtype_are_no_candidate(rewrite: Any) -> None:
    got = rewrite(Model(lambda m, x: F.linear(x, m.w.float().contiguous())), torch.randn(5, 8))
    assert got.of(PASS) == []


def test_the_value_of_copy_is_the_part_that_it_wrote(rewrite: Any) -> None:
    def run(m: Model, x: Tensor) -> Any:
        buf = m.w.new_zeros(8, 8)
        part = buf[:6].copy_(m.w)
        return F.linear(x, buf), F.linear(x, part)

    rewrite(Model(run), torch.randn(5, 8), options=ROOMY)


def test_a_kept_node_that_read_the_buffer_halfway(rewrite: Any) -> None:
    def run(m: Model, x: Tensor) -> Any:
        buf = m.w.new_zeros(8, 8)
        buf[:6] = m.w
        tail = buf[:2] + buf[6:]  # the second part is still zero
        buf[6:] = tail
        return F.linear(x, buf), tail  # handed out: tail is computed on each call

    rewrite(Model(run), torch.randn(5, 8), options=ROOMY)


# ---- random graphs: each step takes earlier values, by number, parameters and activations alike --

UNARY: list[Callable[[Tensor], Tensor]] = [
    lambda a: a * 2,
    lambda a: a.t().contiguous().t(),
    lambda a: a.clone(),
    lambda a: a[:, -4:],
    lambda a: a.chunk(2, 0)[1].repeat(2, 1),
    lambda a: F.pad(a, (0, 1, 0, 1))[:-1, 1:],
    lambda a: a.double().float(),
]
BINARY: list[Callable[[Tensor, Tensor], Any]] = [
    lambda a, b: a + b[:, :1],
    lambda a, b: torch.cat([a, b], 1),
    lambda a, b: a[:, :4].copy_(b[:, :4]),
    lambda a, b: a[:, 1:3].fill_(0.5),
    lambda a, b: a[:, :1].add_(b[:, 1:2]),
    lambda a, b: a.__setitem__((slice(None, 3), slice(None, 2)), b[:3, :2]),
]
STEP = st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 9), st.integers(0, 9))


def play(m: Model, x: Tensor, steps: list[tuple[int, int, int]], ends: list[int]) -> Any:
    """Parameters are cloned before a write, so that the model stays the same."""
    values = [m.w, m.v, m.b, x + 0, m.w.clone()]
    for op, i, j in steps:
        a, b = values[i % len(values)], values[j % len(values)]
        if op < len(UNARY):
            values.append(UNARY[op](a))
            continue
        is_write = op - len(UNARY) >= 2
        if is_write and i % len(values) < 3:
            a = a.clone()
        result = BINARY[op - len(UNARY)](a, b.clone() if is_write else b)
        values += [a] if result is None else [result, a]
    return tuple(x.sum() * values[i % len(values)] for i in ends)


# The fixture resets Dynamo before the first example only, which is enough.
SLOW_AND_ONE_FIXTURE: Any = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(
    max_examples=10, deadline=None, suppress_health_check=SLOW_AND_ONE_FIXTURE, derandomize=True
)
@given(
    steps=st.lists(STEP, min_size=1, max_size=6),
    ends=st.lists(st.integers(0, 9), min_size=1, max_size=2),
)
def test_random_graphs_equal_eager(rewrite: Any, steps: Any, ends: Any) -> None:
    torch._dynamo.reset()
    model, x = Model(lambda m, x: play(m, x, steps, ends)), torch.randn(6, 8)
    got = rewrite(model, x, options=ROOMY)
    follow(got, model, x)
