"""collect_sites: every GEMM with a contract is recorded, with its module path and the range of
M.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint

import compile_ext
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.ops import registry
from compile_ext.passes import Site

ops = torch.ops.compile_ext_tests
EAGER: dict[str, Any] = {"compile_ext.inner": "eager"}


def sites_of(model: Any, *args: Any, **kwargs: Any) -> dict[str, Site]:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="compile_ext", options=EAGER, **kwargs)
    with torch.no_grad():
        compiled(*args)
    return {row.module: row.site for row in compile_ext.explain(compiled).rows if row.site}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = BlockFp8Linear(torch.randn(256, 144))
        self.down = ChannelFp8Linear(torch.randn(50, 256), torch.randn(50))
        self.gate = nn.Linear(144, 8, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x)), self.gate(x).float()


def test_fields() -> None:
    x = torch.randn(5, 144).bfloat16()
    torch._dynamo.mark_dynamic(x, 0, min=2, max=512)
    common: dict[str, Any] = {"m": (2, 512), "kernel": "reference"}
    on_cpu = "the tensors are on cpu"
    assert sites_of(Block(), x) == {
        "up": Site(
            op="compile_ext::block_scaled_mm",
            passed_over=(f"triton_small_m, deep_gemm, aten, triton: runs on CUDA, {on_cpu}",),
            n=256,
            k=144,
            a_dtype="bfloat16",
            b_dtype="float8_e4m3fn",
            out_dtype="bfloat16",
            scales=("-", "2x2"),
            bias=False,
            **common,
        ),
        "down": Site(
            op="compile_ext::scaled_mm",
            passed_over=(f"aten, triton: runs on CUDA, {on_cpu}",),
            n=64,
            k=256,
            a_dtype="float8_e4m3fn",
            b_dtype="float8_e4m3fn",
            out_dtype="bfloat16",
            scales=("mx1", "64x1"),
            bias=True,
            **common,
        ),
        "gate": Site(
            op="compile_ext::router_gemm",
            passed_over=(
                f"cute, triton_small_m: runs on CUDA, {on_cpu}",
                f"aten: torch.mm(out_dtype=) runs on CUDA, {on_cpu}",
            ),
            n=8,
            k=144,
            a_dtype="bfloat16",
            b_dtype="bfloat16",
            out_dtype="float32",
            scales=("-", "-"),
            bias=False,
            **common,
        ),
    }


CALLS = {
    "packet": lambda x, w: ops.gemm(x, w, None, None, False),
    "overload": lambda x, w: ops.gemm.default(x, w, None, None, False),
    "keyword": lambda x, w: ops.gemm(x=x, w=w, scale=None, bias=None, quantized=False),
    "subgraph": lambda x, w: checkpoint(CALLS["packet"], x, w, use_reentrant=False),
    "after a graph break": lambda x, w: (
        torch._dynamo.graph_break(),
        ops.gemm(x, w, None, None, False),
    )[1],
}


class Layer(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.proj.weight)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_third_party_op_in_every_place(call: Any) -> None:
    found = sites_of(nn.Sequential(Layer(call), Layer(call)), torch.randn(5, 8))
    assert {k: (s.op, s.m, s.n, s.k, s.kernel) for k, s in found.items()} == {
        "0.proj": ("compile_ext_tests::gemm", (5, 5), 8, 8, "-"),
        "1.proj": ("compile_ext_tests::gemm", (5, 5), 8, 8, "-"),
    }


def test_layer_compile_lists_every_layer() -> None:
    model = nn.Sequential(*(Layer(CALLS["packet"]) for _ in range(8)))
    for layer in model:
        layer.compile(backend="compile_ext", options=EAGER)
    with torch.no_grad():
        model(torch.randn(5, 8))
    assert [row.module for row in compile_ext.explain(model).rows] == [
        f"{i}.proj" for i in range(8)
    ]
    assert compile_ext.explain(model).graphs == 1


def test_weights_reached_through_views() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.randn(3, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            outs = [ops.gemm(x, self.experts[i], None, None, False) for i in range(3)]
            return torch.stack(outs).sum(0)

    assert set(sites_of(Experts(), torch.randn(5, 8))) == {"experts"}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return ops.bmm(x, self.heads)


def test_m_of_one_axis() -> None:
    x = torch.randn(5, 3, 8)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    site = sites_of(Heads(), x)["heads"]
    assert (site.m, site.n, site.k) == ((2, 64), 16, 8)


def test_an_m_axis_that_the_activation_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    contracts = dict(registry._CONTRACTS)
    monkeypatch.setattr(registry, "_CONTRACTS", contracts)
    gemm = compile_ext.Gemm(a="x", b="w", m_axis=2)
    contracts[ops.bmm.default] = compile_ext.OpContract(gemm=gemm)
    said = r"ContractError: m_axis 2 of the contract of compile_ext_tests.bmm.default: found x of"
    with pytest.raises(TorchDynamoException, match=said):
        sites_of(Heads(), torch.randn(5, 3, 8))


def test_a_gemm_of_two_activations_is_listed() -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return ops.gemm(x, F.relu(y), None, None, False)

    (site,) = sites_of(product, torch.randn(5, 8), torch.randn(16, 8)).values()
    assert (site.m, site.n, site.k) == ((5, 5), 16, 8)
