"""Every spelling of a norm with every spelling of the quantization: fused, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_ext.ops import quantize_fp8_groups

PASS = "fuse_norm_quantize"
FP8 = torch.float8_e4m3fn
K, EPS = 256, 1e-6
aten = torch.ops.aten
FIRED = [(True, "RMSNorm and 1x128 quantization in one op")]


# ---- norms: (x [m, k], weight [k]) -> y, and whether they round before the weight ----------------
def llama(x: Tensor, w: Tensor) -> Tensor:
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return w * x.to(dtype)


def gemma(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + w.float())).type_as(x)


def gpt_oss(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (w * wide).to(x.dtype)


def t5(x: Tensor, w: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + EPS)).to(w.dtype)


def product(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean([-1], True) + EPS) * w).to(x.dtype)


def power(x: Tensor, w: Tensor) -> Tensor:
    wide = x.type(torch.float32)
    return (w * (torch.pow(torch.mean(wide**2, dim=-1, keepdim=True) + EPS, -0.5) * wide)).to(x)


def sum_over_k(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    variance = wide.square().sum(-1, keepdim=True) / x.shape[-1]
    return torch.mul(wide, variance.add(EPS).rsqrt()).mul(w).to(x.dtype)


def unsqueezed(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    r = torch.rsqrt(torch.square(wide).mean(dim=1).add(EPS)).unsqueeze(-1)
    return (wide * r).bfloat16() * w[None, :]


def overloads(x: Tensor, w: Tensor) -> Tensor:
    wide = aten._to_copy.default(x, dtype=torch.float32)
    r = aten.rsqrt.default(aten.mean.dim(aten.mul.Tensor(wide, wide), [-1], True) + EPS)
    y = aten.mul.Tensor(aten.mul(wide, r), w)
    return torch.ops.prims.convert_element_type.default(y, torch.bfloat16)


def in_place(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, [K], eps=EPS, weight=w)  # add_ inside


MODULE = nn.RMSNorm(K, eps=EPS).bfloat16()

NORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "F.rms_norm": (lambda x, w: F.rms_norm(x, (K,), w, EPS), False),
    "keywords": (in_place, False),
    "torch.rms_norm": (lambda x, w: torch.rms_norm(x, (K,), w, EPS), False),
    "aten packet": (lambda x, w: aten.rms_norm(x, [K], w, EPS), False),
    "aten fused": (lambda x, w: aten._fused_rms_norm(x, [K], w, EPS)[0], False),
    "nn.RMSNorm": (lambda x, w: MODULE(x), False),
    "no weight": (lambda x, w: F.rms_norm(x, (K,), None, EPS), False),
    "Llama": (llama, True),
    "Gemma": (gemma, False),
    "gpt-oss": (gpt_oss, False),
    "T5": (t5, True),
    "product": (product, False),
    "pow": (power, False),
    "sum / k": (sum_over_k, False),
    "unsqueezed": (unsqueezed, True),
    "overloads": (overloads, False),
}


# ---- quantizations: y [m, k] -> q [m, k], scale [m, k/128] ---------------------------------------
def ours(y: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_fp8_groups(y)


def sglang(y: Tensor) -> tuple[Tensor, Tensor]:
    info = torch.finfo(FP8)
    grouped = y.float().view(-1, K // 128, 128)
    amax = grouped.abs().max(dim=-1, keepdim=True)[0].clamp_min(1e-10)
    scale = amax / info.max
    q = torch.clamp(grouped / scale, info.min, info.max).to(dtype=FP8)
    return q.view(-1, K), scale.squeeze(-1)


def without_clamp(y: Tensor) -> tuple[Tensor, Tensor]:
    grouped = y.unflatten(-1, (K // 128, 128)).float()
    scale = torch.maximum(torch.amax(torch.abs(grouped), 2), torch.full((), 1e-10)) / 448
    return torch.div(grouped, scale[..., None]).to(FP8).flatten(-2), scale


def clamped_twice(y: Tensor) -> tuple[Tensor, Tensor]:
    grouped = torch.reshape(y, (-1, 2, 128)).to(torch.float32)
    scale = torch.clip(grouped.abs().amax([-1], True), 1e-10) / 448.0
    wide = grouped / scale.expand(-1, -1, 128)
    q = wide.clamp(max=448).clamp(min=-448)
    return q.to(FP8).contiguous().view(-1, K), scale.view(-1, 2)


def computed_twice(y: Tensor) -> tuple[Tensor, Tensor]:
    x = y.view(-1, 2, 128)
    first = x.abs().float().amax(dim=2).view(-1, 2).clamp(1e-10)
    q = (x.float() / (first / 448.0).unsqueeze(2)).clamp(-448, 448).to(FP8)
    return q.view(-1, K), (first / 448.0).view(-1, 2)


def column_major(y: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = sglang(y)
    out = torch.empty_strided(scale.shape, (1, (y.shape[0] + 3) // 4 * 4), dtype=torch.float32)
    out.copy_(scale)
    return q, out


QUANTIZATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "ours": ours,
    "SGLang": sglang,
    "without clamp": without_clamp,
    "clamped twice": clamped_twice,
    "computed twice": computed_twice,
    "column-major": column_major,
}


def tokens(*shape: int) -> Tensor:
    # A group of zeros, where a floor shows, and magnitudes over three decades.
    x = torch.randn(*shape) * torch.logspace(-2, 1, shape[-1])
    x[..., :128] *= (torch.rand(shape[:-1]) > 0.3).unsqueeze(-1)
    return x.bfloat16()


class Model(nn.Module):
    def __init__(self, norm: Any, quantize: Any) -> None:
        super().__init__()
        self.norm, self.quantize = norm, quantize
        self.w = nn.Parameter(torch.randn(K).bfloat16())

    def forward(self, x: Tensor) -> Any:
        return self.quantize(self.norm(x, self.w))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_every_spelling(rewrite: Any, norm: str, quantization: str) -> None:
    function, round_before_weight = NORMS[norm]
    model = Model(function, QUANTIZATIONS[quantization])
    got = rewrite(model, tokens(5, K))  # bit for bit eager's
    assert got.of(PASS) == FIRED
    (call,) = [line for line in got.graph.splitlines() if "compile_ext::" in line]
    assert call.endswith(f", 1e-06, {round_before_weight})")
    for op in ("amax", "rsqrt", "mean", "rms_norm(", "to(", "abs", "clamp", "copy_", "empty"):
        assert f".{op}" not in got.graph.replace("compile_ext::rms_norm", "")


@pytest.mark.parametrize("quantization", ["ours", "SGLang", "column-major"])
@pytest.mark.parametrize("norm", ["F.rms_norm", "Llama"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(rewrite: Any, norm: str, quantization: str, dtype: torch.dtype) -> None:
    model = Model(NORMS[norm][0], QUANTIZATIONS[quantization]).to(dtype)
    assert rewrite(model, tokens(5, K).to(dtype)).of(PASS) == FIRED


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_few_tokens(rewrite: Any, quantization: str, m: int) -> None:
    model = Model(llama, QUANTIZATIONS[quantization])
    assert rewrite(model, tokens(m, K)).of(PASS) == FIRED


@pytest.mark.parametrize("k", [129, 200, 300, 2000])
def test_partial_groups(rewrite: Any, k: int) -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (k,), None, EPS)

    assert rewrite(Model(norm, ours), tokens(3, k)).of(PASS) == FIRED


TRANSFORMERS = [
    "llama.modeling_llama.LlamaRMSNorm",
    "gemma.modeling_gemma.GemmaRMSNorm",
    "qwen3.modeling_qwen3.Qwen3RMSNorm",
    "deepseek_v3.modeling_deepseek_v3.DeepseekV3RMSNorm",
    "gpt_oss.modeling_gpt_oss.GptOssRMSNorm",
    "llama4.modeling_llama4.Llama4TextRMSNorm",
]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(rewrite: Any, name: str) -> None:
    module, _, kind = name.rpartition(".")
    made = getattr(pytest.importorskip(f"transformers.models.{module}"), kind)(K, EPS).bfloat16()
    nn.init.normal_(made.weight)

    def model(x: Tensor) -> Any:
        y = made(x)
        return quantize_fp8_groups(y.view(-1, K))

    assert rewrite(model, tokens(2, 3, K)).of(PASS) == FIRED
