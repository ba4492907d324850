"""``scaled``: what a rank of a tensor-parallel group calls is what a model of its sizes calls."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from manifest_model import H200, tokens
from torch import Tensor, nn

import compile_ext
from compile_ext.layers import BlockFp8Linear, ChannelFp8Linear
from compile_ext.manifest import Manifest, ManifestSite
from compile_ext.manifest.resize import aligned, resized
from compile_ext.ops import fp8_bmm
from compile_ext.ops.call_site import CallSite, TensorForm
from compile_ext.ops.device import as_if_on
from compile_ext.ops.errors import ManifestError


class Layers(nn.Module):
    """What one rank of ``parts`` has: by N, by K, whole; a bias of each kind."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.q_proj = BlockFp8Linear(torch.randn(1024 // parts, 512), torch.randn(1024 // parts))
        self.o_proj = BlockFp8Linear(torch.randn(512, 1024 // parts))
        self.up_proj = ChannelFp8Linear(torch.randn(768 // parts, 512), torch.randn(768 // parts))
        self.down_proj = ChannelFp8Linear(torch.randn(512, 768 // parts), torch.randn(512))
        self.q_a_proj = BlockFp8Linear(torch.randn(192, 512))
        self.gate = nn.Linear(512, 16, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Any:
        x = self.o_proj(self.q_proj(x))
        x = self.down_proj(self.up_proj(x))
        return self.q_a_proj(x), self.gate(x).float()


@functools.cache  # 2 s each
def of_layers(parts: int) -> Manifest:
    torch._dynamo.reset()
    with torch.device("meta"):
        model = Layers(parts)
    with torch.no_grad(), as_if_on(H200):
        found = compile_ext.collect(model, tokens(5, "meta"))
    return gemms(found)


def gemms(manifest: Manifest) -> Manifest:
    """What quantizes a part of an activation is no GEMM, and is not divided."""
    return Manifest(tuple(s for s in manifest.sites if s.call.n is not None))


@pytest.mark.parametrize("parts", [2, 8])
def test_a_part_is_what_a_rank_compiles(parts: int) -> None:
    whole, rank = of_layers(1), of_layers(parts)
    assert whole.scaled(tensor_parallel=parts) == rank
    assert whole.scaled(tensor_parallel=1) == whole
    assert len(rank.sites) == 6


def site(call: CallSite, *modules: str) -> Manifest:
    return Manifest((ManifestSite(call, modules),))


def block(n: int, k: int) -> CallSite:
    return CallSite(
        "compile_ext::block_scaled_mm.default",
        (2, None),
        (
            ("a", TensorForm("float8_e4m3fn", ("M", k), (k, 1))),
            ("b", TensorForm("float8_e4m3fn", (n, k), (k, 1))),
            ("scale_a", TensorForm("float32", ("M", -(-k // 128)), (1, "4*((M + 3)//4)"))),
            ("scale_b", TensorForm("float32", (-(-n // 128), -(-k // 128)), (-(-k // 128), 1))),
            ("bias", None),
            ("out_dtype", torch.bfloat16),
            ("prefetch", False),
            ("pinned", None),
        ),
        n,
        k,
    )


def sizes(manifest: Manifest) -> dict[str, Any]:
    return {m: (s.call.n, s.call.k) for s in manifest.sites for m in s.modules}


def test_equal_calls_of_other_roles_part() -> None:
    found = site(block(512, 512), "0.o_proj", "0.q_proj", "0.q_a_proj").scaled(4)
    assert sizes(found) == {
        "0.o_proj": (512, 128),
        "0.q_proj": (128, 512),
        "0.q_a_proj": (512, 512),
    }


def test_the_last_name_that_is_known_counts() -> None:
    modules = "gate.down_proj", "mlp.gate", "experts.w2_weight", "gate_proj", "wo.lora", "head"
    assert sizes(site(block(512, 512), *modules).scaled(2)) == {
        "gate.down_proj": (512, 256),
        "mlp.gate": (512, 512),
        "experts.w2_weight": (512, 256),
        "gate_proj": (256, 512),
        "wo.lora": (512, 256),
        "head": (256, 512),
    }


def test_shards_come_first() -> None:
    manifest = site(block(512, 512), "0.o_proj", "1.o_proj", "0.x", "1.x")
    shards: dict[str, Any] = {"0.*": None, "*.x": "k"}
    assert sizes(manifest.scaled(2, shards=shards)) == {
        "0.o_proj": (512, 512),
        "1.o_proj": (512, 256),
        "0.x": (512, 512),
        "1.x": (512, 256),
    }


def test_partial_blocks_and_padding() -> None:
    call = site(block(576, 7168), "kv_b_proj").scaled(8).sites[0].call
    assert call.n == 80  # 72 columns, padded to 16
    assert call.argument("b") == TensorForm("float8_e4m3fn", (80, 7168), (7168, 1))
    assert call.argument("scale_b") == TensorForm("float32", (1, 56), (56, 1))
    call = site(block(576, 7168), "o_proj").scaled(8).sites[0].call
    assert call.argument("a") == TensorForm("float8_e4m3fn", ("M", 896), (896, 1))
    assert call.argument("scale_a") == TensorForm("float32", ("M", 7), (1, "4*((M + 3)//4)"))
    assert call.argument("scale_b") == TensorForm("float32", (5, 7), (8, 1))  # rows of 16 bytes


def test_heads_are_divided_where_an_op_has_some() -> None:
    a, b = torch.randn(4, 16, 128).to(torch.float8_e4m3fn), torch.randn(16, 64, 128)
    scale_b = torch.ones(16, 1, 1)

    def heads(a: Tensor, scale_a: Tensor) -> Tensor:
        return fp8_bmm(a, b.to(torch.float8_e4m3fn), scale_a, scale_b)

    torch._dynamo.mark_dynamic(a, 0)
    scale_a = torch.ones(4, 16, 1)
    torch._dynamo.mark_dynamic(scale_a, 0)
    with torch.no_grad():
        (whole,) = compile_ext.collect(heads, a, scale_a).sites
    call = site(whole.call, "kv_b_proj").scaled(8).sites[0].call
    assert (call.n, call.k) == (64, 128)
    shapes = [call.argument(x).shape for x in ("a", "b", "scale_a", "scale_b")]
    assert shapes == [("M", 2, 128), (2, 64, 128), ("M", 2, 1), (2, 1, 1)]
    assert call.argument("a").strides == (256, 128, 1)


REFUSED: dict[str, tuple[Manifest, dict[str, Any], str]] = {
    "a rest": (
        site(block(576, 512), "0.q_proj"),
        {"tensor_parallel": 5},
        r"Manifest.scaled, 0.q_proj: found n = 576 in 5 parts; .* fix: .* shards=\{'0.q_proj'",
    ),
    "an unknown op": (
        site(dataclasses.replace(block(512, 512), op="not_here::gemm.default"), "x"),
        {"tensor_parallel": 2},
        "found not_here::gemm.default, not known here",
    ),
    "no ranks": (Manifest(), {"tensor_parallel": 0}, "tensor_parallel = 0"),
    "half a rank": (Manifest(), {"tensor_parallel": 0.5}, "tensor_parallel = 0.5"),
    "a strange shard": (Manifest(), {"tensor_parallel": 2, "shards": {"*": "m"}}, "= 'm'; wanted"),
}


@pytest.mark.parametrize(("manifest", "arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(manifest: Manifest, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        manifest.scaled(**arguments)


RESIZED = {
    "rows": (("M", 64), (64, 1), 1, 32, (32, 1)),
    "columns": (("M", 64), (1, "4*((M + 3)//4)"), 1, 32, (1, "4*((M + 3)//4)")),
    "columns of a wider tensor": ((512, 64), (1, 1024), 0, 256, (1, 512)),
    "rows of a wider tensor": (("M", 64), (192, 1), 1, 32, (96, 1)),
    "a batch outside": ((8, "M", 64), ("64*M", 64, 1), 2, 32, ("32*M", 32, 1)),
    "heads inside": (("M", 8, 64), (512, 64, 1), 1, 2, (128, 64, 1)),
    "experts outside": ((8, 16, 64), (1024, 64, 1), 1, 4, (256, 64, 1)),
    "one column": (("M", 1), (1, 1), 1, 1, (1, 1)),
}


@pytest.mark.parametrize(
    ("shape", "strides", "axis", "size", "wanted"), RESIZED.values(), ids=RESIZED
)
def test_strides_follow(shape: Any, strides: Any, axis: int, size: int, wanted: Any) -> None:
    found = resized(TensorForm("int8", shape, strides), axis, size)
    assert (found.shape[axis], found.strides) == (size, wanted)


def test_a_stride_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="a stride of 65 over 64 elements"):
        resized(TensorForm("int8", ("M", 64), (65, 1)), 1, 32)


def test_strides_fit_what_the_kernel_wants() -> None:
    form = aligned(TensorForm("float32", (4, 7), (7, 1)), 4)
    assert form == TensorForm("float32", (4, 7), (8, 1))
