"""Who reads the logits of a router: float32 where it converts to it, else bfloat16, as before."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from router_model import LOGITS, PASS, Router, tokens
from torch import Tensor

import compile_ext

# One step of bfloat16 at 8: the sum in another order may round to the other side.
STEP = 8 * 2.0**-8


def test_a_top_k_of_bfloat16_logits(rewrite: Any) -> None:
    """gpt-oss, Llama-4: rounded as in eager mode, so that the experts are the same."""
    got = rewrite(Router(lambda x, w: torch.topk(F.linear(x, w), 2)), tokens(5, 32), tolerance=STEP)
    assert got.of(PASS) == [(True, "logits in float32, bfloat16 for topk")]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[16, 32]
arg1: bfloat16[5, 32]
%0: float32[5, 16] = compile_ext::router_gemm(arg1, arg0, None)
%1: bfloat16[5, 16] = .to(%0, bfloat16)
%2 = topk(%1, 2)
%3: bfloat16[5, 2] = getitem(%2, 0)
%4: int64[5, 2] = getitem(%2, 1)
return [%3, %4]""",
    )


def test_the_router_keeps_its_row() -> None:
    """What is said of the linear is said of the op, and not of the cast behind it."""
    model = Router(lambda x, w: torch.topk(F.linear(x, w), 2))
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    with torch.no_grad():
        torch.compile(model, backend="compile_ext", options=options)(tokens(1, 32))
    [row] = compile_ext.explain(model).rows
    assert row.op == "compile_ext::router_gemm_m1"
    assert row.site is not None
    passes = [d.pass_name for d in row.decisions if d.fired]
    assert passes == ["lower_router_linear", "specialize_m1"]


def test_both(rewrite: Any) -> None:
    def routed(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        return y.softmax(-1, dtype=torch.float32).topk(2)[0], y

    got = rewrite(Router(routed), tokens(5, 32), tolerance=STEP)
    assert got.of(PASS) == [(True, "logits in float32, bfloat16 for output")]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[16, 32]
arg1: bfloat16[5, 32]
%0: float32[5, 16] = compile_ext::router_gemm(arg1, arg0, None)
%1: bfloat16[5, 16] = .to(%0, bfloat16)
%2: float32[5, 16] = .softmax(%0, -1, dtype=float32)
%3 = .topk(%2, 2)
%4: float32[5, 2] = getitem(%3, 0)
return [%4, %1]""",
    )


def test_a_view_of_both(rewrite: Any) -> None:
    def routed(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w).view(5, 4, 4)
        return y.float(), y.topk(2)[0]

    got = rewrite(Router(routed), tokens(5, 32), tolerance=STEP)
    assert got.of(PASS) == [(True, "logits in float32, bfloat16 for topk")]
    assert_expected_inline(
        got.graph,
        """\
arg0: bfloat16[16, 32]
arg1: bfloat16[5, 32]
%0: float32[5, 16] = compile_ext::router_gemm(arg1, arg0, None)
%1: bfloat16[5, 16] = .to(%0, bfloat16)
%2: float32[5, 4, 4] = .view(%0, 5, 4, 4)
%3: bfloat16[5, 4, 4] = .view(%1, 5, 4, 4)
%4: float32[5, 4, 4] = clone(%2)
%5 = .topk(%3, 2)
%6: bfloat16[5, 4, 2] = getitem(%5, 0)
return [%4, %6]""",
    )


def test_outputs_that_share_memory_still_do() -> None:
    def routed(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        flat = y.flatten()
        return y, flat, flat.softmax(-1, dtype=torch.float32)

    model, x = Router(routed), tokens(5, 32)
    options: dict[str, Any] = {"compile_ext.inner": "eager"}
    with torch.no_grad():
        y, flat, _ = torch.compile(model, backend="compile_ext", options=options)(x)
    assert y.data_ptr() == flat.data_ptr()


def test_casts_that_others_write_are_tensors_of_their_own(rewrite: Any) -> None:
    def routed(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        masked, scores, shaped = y.float(), y.float(), y.view(-1, 4, 4).float()
        masked[:, 0] = 100.0
        shaped.add_(1)
        return masked.topk(2)[0], scores.softmax(-1), y.float().sum(), shaped.sum()

    got = rewrite(Router(routed), tokens(5, 32), tolerance=80 * LOGITS)  # a sum of 80
    assert got.of(PASS) == [(True, "logits stay in float32")]
    assert got.graph.count("clone(") == 2


def test_two_casts_that_nobody_writes_are_one(rewrite: Any) -> None:
    def routed(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        return y.float().softmax(-1).topk(2)[0], y.float().sigmoid()

    got = rewrite(Router(routed), tokens(5, 32), tolerance=LOGITS)
    assert "clone" not in got.graph


def test_logits_that_the_graph_writes(rewrite: Any) -> None:
    def routed(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        before = y.float().sum()
        y[:, 3] = -torch.inf
        y += 1  # the bias of some routers
        return before, y.float().topk(2)[0]

    got = rewrite(Router(routed), tokens(5, 32), tolerance=80 * STEP)  # a sum of 80
    assert got.of(PASS) == [(True, "logits in float32, bfloat16 for float, setitem, iadd")]
    assert got.graph.count(".float(") == 2


def test_dead_logits_leave_nothing(rewrite: Any) -> None:
    def routed(x: Tensor, w: Tensor) -> Any:
        y = F.linear(x, w)
        return y.view(-1, 16).float().softmax(-1).topk(2)[0]

    got = rewrite(Router(routed), tokens(5, 32), tolerance=LOGITS)
    calls = [line.split("= ")[1].split("(")[0] for line in got.graph.splitlines()[2:-1]]
    assert calls == ["compile_ext::router_gemm", ".view", ".softmax", ".topk", "getitem"]
