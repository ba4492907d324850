"""fold_parameter_math on pads that a user wrote (``F.pad(weight)`` on each call): every spelling,
branches of a cond, and when the pass stands back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from compile_ext.layers import BlockFp8Linear
from compile_ext.ops import grouped_block_scaled_mm_masked

PASS = "fold_parameter_math"


class HandPad(nn.Module):
    """Pads its weight on each call, as a wrapper around a kernel does."""

    def __init__(self, pad: Any) -> None:
        super().__init__()
        self.pad = pad
        self.w = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.pad(self.w))


HAND_PADS = {
    "F.pad": lambda w: F.pad(w, (0, 0, 0, 2)),
    "keyword": lambda w: F.pad(w, pad=(0, 0, 0, 2), mode="constant", value=0.0),
    "value": lambda w: F.pad(w, (0, 0, 0, 2), value=1.5),
    "list": lambda w: F.pad(w, [0, 0, 0, 2]),
    "constant_pad_nd": lambda w: torch.constant_pad_nd(w, [0, 0, 0, 2], 0),
    "aten": lambda w: torch.ops.aten.constant_pad_nd.default(w, [0, 0, 0, 2]),
    "aten packet": lambda w: torch.ops.aten.constant_pad_nd(w, [0, 0, 0, 2], 2.0),
}


@pytest.mark.parametrize("pad", HAND_PADS.values(), ids=HAND_PADS)
def test_hand_written_pad_in_every_spelling(rewrite: Any, pad: Any) -> None:
    model = HandPad(pad)
    got = rewrite(model, torch.randn(5, 8))
    assert [fired for fired, _ in got.of(PASS)] == [True]
    assert [n.target for n in got.modules[-1].graph.nodes if n.op == "call_function"] == [F.linear]


def test_hand_written_pad_graph(rewrite: Any) -> None:
    got = rewrite(HandPad(HAND_PADS["F.pad"]), torch.randn(5, 8))
    assert_expected_inline(
        got.graph,
        """\
arg1: float32[5, 8]
arg2: float32[8, 8] = pad([0, 0, 0, 2], 0)
%0: float32[5, 8] = linear(arg1, arg2)
return [%0]""",
    )


def test_inside_one_branch_of_a_cond(rewrite: Any) -> None:
    class Branches(HandPad):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(
                x.sum() > 0,
                lambda x: F.linear(x, self.pad(self.w)),
                lambda x: F.linear(x, self.w.repeat(2, 1)[:8]) * 2,
                (x,),
            )

    got = rewrite(Branches(HAND_PADS["F.pad"]), torch.ones(5, 8))
    assert got.of(PASS) == [
        (True, "pad([0, 0, 0, 2], 0) of a parameter is a derived constant"),
        # The other branch's w.repeat(2, 1): larger than an eighth of the weights, 192 bytes.
        (False, "it would take 384 bytes, and 24 of 24 are left (compile_ext.memory_budget)"),
    ]
    assert_expected_inline(
        got.graph,
        """\
arg0: float32[5, 8]
arg1: float32[6, 8]
arg2: float32[8, 8] = pad([0, 0, 0, 2], 0)
%0: float32[] = .sum(arg0)
%1: bool[] = gt(%0, 0)
%2 = body:
    arg1: float32[5, 8]
    arg2: float32[8, 8] = pad([0, 0, 0, 2], 0)
    %0: float32[5, 8] = linear(arg1, arg2)
    return [%0]
%3 = body:
    arg0: float32[6, 8]
    arg1: float32[5, 8]
    %0: float32[12, 8] = .repeat(arg0, 2, 1)
    %1: float32[8, 8] = getitem(%0, slice(None, 8, None))
    %2: float32[5, 8] = linear(arg1, %1)
    %3: float32[5, 8] = mul(%2, 2)
    return [%3]
%4 = cond(%1, %2, %3, [arg1, arg0, arg2])
%5: float32[5, 8] = getitem(%4, 0)
return [%5]""",
    )


def test_not_a_weight_that_the_graph_writes(rewrite: Any) -> None:
    class Writes(HandPad):
        def forward(self, x: Tensor) -> Tensor:
            self.w[0].zero_()  # through a view
            return super().forward(x)

    got = rewrite(Writes(HAND_PADS["F.pad"]), torch.randn(5, 8))
    assert got.of(PASS) == [(False, "the graph writes it")]


def test_not_when_a_gradient_is_needed(rewrite: Any) -> None:
    got = rewrite(HandPad(HAND_PADS["F.pad"]), torch.randn(5, 8), grad=True)
    assert got.of(PASS) == [(False, "it needs a gradient")]


def test_not_under_autocast(rewrite: Any) -> None:
    class Autocast(HandPad):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    got = rewrite(Autocast(HAND_PADS["F.pad"]), torch.randn(5, 8))
    assert got.of(PASS) == [(False, "it is inside an autocast region")]


def test_not_an_inference_tensor(rewrite: Any) -> None:
    with torch.inference_mode():
        model = HandPad(HAND_PADS["F.pad"])
        x = torch.randn(5, 8)
    with torch.inference_mode():
        got = rewrite(model, x)
    assert got.of(PASS) == [
        (False, "it is an inference tensor: without a version counter an update could not be seen")
    ]


def test_switched_off(rewrite: Any) -> None:
    got = rewrite(
        HandPad(HAND_PADS["F.pad"]), torch.randn(5, 8), options={"compile_ext.disable": [PASS]}
    )
    assert got.of(PASS) == []


class Experts(nn.Module):
    """Keeps a layer for each expert, as checkpoints do, and stacks the weights on each call."""

    def __init__(self) -> None:
        super().__init__()
        self.experts: Any = nn.ModuleList(BlockFp8Linear(torch.randn(130, 200)) for _ in range(3))

    def forward(self, a: Tensor, scale_a: Tensor) -> Tensor:
        used = torch.full((3,), 4, dtype=torch.int32)
        weight = torch.stack([e.weight for e in self.experts])
        scale = torch.stack([e.weight_scale for e in self.experts])
        return grouped_block_scaled_mm_masked(a, weight, scale_a, scale, used, 4)


def test_experts_stacked_on_each_call(rewrite: Any) -> None:
    a, scale_a = torch.randn(3, 5, 200).to(torch.float8_e4m3fn), torch.rand(3, 5, 2)
    got = rewrite(Experts(), a, scale_a, options={"compile_ext.memory_budget": 2**20})
    assert [fired for fired, _ in got.of(PASS)] == [True, True]
    assert got.of("fold_weight_padding") == []
    *_, scales, weights, used, _, _ = got.graph.splitlines()
    assert scales == "arg8: float32[3, 2, 2] = stack"
    assert weights == "arg9: float8_e4m3fn[3, 130, 200] = stack"
    assert used == "arg10: int32[3] = full(4)"
