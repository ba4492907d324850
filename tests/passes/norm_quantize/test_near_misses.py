"""Norms and quantizations that are nearly those of the op: left alone, and the reason names what
differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_ext.ops import quantize_fp8_groups, quantize_fp8_per_token

PASS = "fuse_norm_quantize"
FP8 = torch.float8_e4m3fn
K, EPS = 256, 1e-6


class Model(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.randn(K).bfloat16())

    def forward(self, x: Tensor) -> Any:
        return self.body(x, self.w)


def tokens(*shape: int) -> Tensor:
    x = torch.randn(*shape)
    x[..., :128] *= (torch.rand(shape[:-1]) > 0.3).unsqueeze(-1)
    return x.bfloat16()


def reason(rewrite: Any, body: Callable[[Tensor, Tensor], Any], x: Tensor | None = None) -> str:
    got = rewrite(Model(body), tokens(5, K) if x is None else x)
    assert "compile_ext::" not in got.graph.replace("compile_ext::column_major", "")
    ((fired, detail),) = got.of(PASS)
    assert not fired
    return detail


# ---- quantizations -------------------------------------------------------------------------------
def quantize(
    y: Tensor,
    floor: float = 1e-10,
    group: int = 128,
    top: float = 448.0,
    limit: float = 448.0,
    divide: Callable[[Tensor, Tensor], Tensor] = torch.div,
) -> tuple[Tensor, Tensor]:
    grouped = y.float().view(y.shape[0], -1, group)
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=floor) / top
    q = divide(grouped, scale).clamp(-limit, limit).to(FP8)
    return q.view(y.shape), scale.squeeze(-1)


def deepseek(y: Tensor) -> tuple[Tensor, Tensor]:  # DeepGEMM's per_token_cast_to_fp8
    x = y.view(y.shape[0], -1, 128)
    amax = x.abs().float().amax(dim=2).view(y.shape[0], -1).clamp(1e-4)
    return (x * (448.0 / amax.unsqueeze(2))).to(FP8).view(y.shape), (amax / 448.0)


def vllm(y: Tensor) -> tuple[Tensor, Tensor]:  # its native twin clamps before the cast to float32
    grouped = y.reshape(y.numel() // 128, 128)
    amax = grouped.abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-10).to(torch.float32)
    scale = amax / 448.0
    q = (grouped / scale).clamp(min=-448.0, max=448.0).to(FP8)
    return q.reshape(y.shape), scale.reshape(y.shape[0], -1)


def powers_of_two(y: Tensor) -> tuple[Tensor, Tensor]:
    grouped = y.float().view(y.shape[0], -1, 128)
    scale = torch.exp2(torch.ceil(torch.log2(grouped.abs().amax(-1).clamp(min=1e-10) / 448.0)))
    return (grouped / scale[..., None]).clamp(-448, 448).to(FP8).view(y.shape), scale


def rounded_quotient(y: Tensor) -> tuple[Tensor, Tensor]:
    grouped = y.view(y.shape[0], -1, 128)
    scale = grouped.abs().amax(-1, keepdim=True).float().clamp(min=1e-10) / 448.0
    return (grouped / scale).to(y.dtype).clamp(-448, 448).to(FP8).view(y.shape), scale.squeeze(-1)


def interleaved(y: Tensor) -> tuple[Tensor, Tensor]:
    grouped = y.float().view(y.shape[0], 128, -1)  # every second element
    scale = grouped.abs().amax(1, keepdim=True).clamp(min=1e-10) / 448.0
    return (grouped / scale).clamp(-448, 448).to(FP8).view(y.shape), scale.squeeze(1)


WANTED = "not the quantization of quantize_fp8_groups: it has {} where quantize_fp8_groups has {}"
FLOOR = "clamp(..., 1e-10, None)"
QUANTIZATIONS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "another floor": (
        lambda y: quantize(y, floor=1e-12), "clamp(..., 1e-12, None)", FLOOR),
    "no floor": (lambda y: quantize(y, floor=-1.0), "clamp(..., -1, None)", FLOOR),
    "another maximum": (lambda y: quantize(y, top=240.0), "div(..., 240)", "div(..., 448)"),
    "groups of 64": (lambda y: quantize(y, group=64), "amax(..., 64)", "amax(..., 128)"),
    "another limit": (
        lambda y: quantize(y, limit=440.0),
        "clamp(..., -440, 440)", "clamp(..., -448, 448)"),
    "by the inverse": (
        lambda y: quantize(y, divide=lambda x, s: x * (1 / s)), "mul(..., ...)", "div(..., ...)"),
    "DeepGEMM": (deepseek, "mul(..., ...)", "clamp(..., -448, 448)"),
    "vLLM in bfloat16": (vllm, "", ""),
    "rounded quotient": (rounded_quotient, "", ""),
    "powers of two": (powers_of_two, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", QUANTIZATIONS)
def test_not_another_quantization(rewrite: Any, case: str) -> None:
    function, has, wants = QUANTIZATIONS[case]
    detail = reason(rewrite, lambda x, w: function(F.rms_norm(x, (K,), w, EPS)))
    print(case, detail)
    if has:
        assert detail == WANTED.format(has, wants)
    else:
        assert detail.startswith("not the quantization of quantize_fp8_groups: ")


# ---- norms ---------------------------------------------------------------------------------------
def layer_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    return (centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + EPS) * w).to(x.dtype)


def normed(x: Tensor, w: Tensor, r: Callable[[Tensor], Tensor]) -> Tensor:
    wide = x.float()
    return (r(wide) * w).to(x.dtype)


def by_sqrt(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def one_over_sqrt(x: Tensor) -> Tensor:  # one bit away in float32, on the CPU as well
    return x * (1 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def eps_outside(x: Tensor) -> Tensor:
    return x * (1 / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + EPS))


def eps_as_floor(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=EPS))


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS)


def of_halves(x: Tensor) -> Tensor:
    halves = x.view(x.shape[0], 2, -1).pow(2).mean(-1).mean(-1, keepdim=True)
    return x * torch.rsqrt(halves + EPS)


def over_tokens(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + EPS)


def weighed_before(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * w * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def low_precision(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def cubed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS)


NORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "LayerNorm": (layer_norm, "the mean is subtracted before it"),
    "x / sqrt": (lambda x, w: normed(x, w, by_sqrt), "it has div(..., ...) where"),
    "1 / sqrt": (lambda x, w: normed(x, w, one_over_sqrt), "reciprocal(...) where"),
    "eps outside the root": (lambda x, w: normed(x, w, eps_outside), "reciprocal(...) where"),
    "eps as a floor": (lambda x, w: normed(x, w, eps_as_floor), "clamp(..., 1e-06, None) where"),
    "L2": (lambda x, w: normed(x, w, l2_norm), "sum(..., 256) where"),
    "weight before": (weighed_before, "it has "),
    "in bfloat16": (low_precision, "it has "),
    "cubed": (lambda x, w: normed(x, w, cubed), "it has "),
    "gated": (lambda x, w: F.rms_norm(x, (K,), w, EPS) * F.silu(x), "it has "),
    "biased": (lambda x, w: F.rms_norm(x, (K,), w, EPS) + 1.0, "it has "),
    "scaled": (lambda x, w: F.rms_norm(x, (K,), w, EPS) * 0.5, "it has "),
}


@pytest.mark.parametrize("case", NORMS)
def test_not_another_norm(rewrite: Any, case: str) -> None:
    function, part = NORMS[case]
    detail = reason(rewrite, lambda x, w: quantize_fp8_groups(function(x, w)))
    print(case, detail)
    assert detail.startswith("not an RMSNorm: ")
    assert part in detail


def test_not_another_dtype_than_that_of_x(rewrite: Any) -> None:
    def wide(x: Tensor, w: Tensor) -> Any:
        return quantize_fp8_groups(F.rms_norm(x.float(), (K,), w.float(), EPS))

    assert reason(rewrite, wide) == "x is bfloat16, the normed activation float32"


def test_not_a_wide_residual_stream(rewrite: Any) -> None:
    def narrow(x: Tensor, w: Tensor) -> Any:
        return quantize_fp8_groups(F.rms_norm(x, (K,), w.float(), EPS).bfloat16())

    detail = reason(rewrite, narrow, tokens(5, K).float())
    assert detail == "x is float32, the normed activation bfloat16"


def test_not_a_weight_for_each_token(rewrite: Any) -> None:
    def gated(x: Tensor, w: Tensor) -> Any:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
        return quantize_fp8_groups((y * x.tanh()).to(x.dtype))

    assert reason(rewrite, gated) == "its weight is [5, 256], not [256]"


def test_not_one_row_that_is_repeated(rewrite: Any) -> None:
    def repeated(x: Tensor, w: Tensor) -> Any:
        return quantize_fp8_groups(F.rms_norm(x[:1].expand(5, K), (K,), w, EPS))

    got = rewrite(Model(repeated), tokens(5, K))
    assert all(
        detail == "x is repeated before it is normed" for fired, detail in got.of(PASS) if not fired
    )


OTHERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "per token": lambda x, w: quantize_fp8_per_token(F.rms_norm(x, (K,), w, EPS)),
    "no norm": lambda x, w: quantize_fp8_groups(F.silu(x) * w),
    "F.layer_norm": lambda x, w: quantize_fp8_groups(F.layer_norm(x, (K,), w)),
    "a constant scale": lambda x, w: (F.rms_norm(x, (K,), w) / 0.1).clamp(-448, 448).to(FP8),
    "groups across rows": lambda x, w: interleaved(F.rms_norm(x, (K,), w, EPS)),
    "mean of means": lambda x, w: quantize_fp8_groups(normed(x, w, of_halves)),
    "one group": lambda x, w: quantize_fp8_groups(F.rms_norm(x[:, :128], (128,), w[:128], EPS)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_no_candidate(rewrite: Any, case: str) -> None:
    assert rewrite(Model(OTHERS[case]), tokens(5, K)).of(PASS) == []


def test_one_over_sqrt_has_other_bits() -> None:
    x = torch.rand(4096) + 0.1
    assert not torch.equal(torch.rsqrt(x), 1 / torch.sqrt(x))
