"""RMSNorms in every spelling before a router, those of transformers among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from routed_model import EPS, NORM, PASS, K, Layer, tokens
from torch import Tensor

SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "F.rms_norm": lambda x, w: F.rms_norm(x, (K,), w, EPS),
    "aten fused": lambda x, w: torch.ops.aten._fused_rms_norm(x, [K], w, EPS)[0],
    "no weight": lambda x, w: F.rms_norm(x, (K,), None, EPS),
    "Gemma": lambda x, w: (F.rms_norm(x.float(), (K,), None, EPS) * (1.0 + w.float())).type_as(x),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(rewrite: Any, spelling: str) -> None:
    def body(self: Layer, x: Tensor) -> Any:
        y = SPELLINGS[spelling](x, self.w)
        return self.route(y), self.experts(y)

    assert rewrite(Layer(body), tokens(5, K)).of(PASS) == [NORM]


NORMS_OF_TRANSFORMERS = [
    ("llama.modeling_llama", "LlamaRMSNorm"),
    ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeRMSNorm"),
    ("deepseek_v3.modeling_deepseek_v3", "DeepseekV3RMSNorm"),
    ("gpt_oss.modeling_gpt_oss", "GptOssRMSNorm"),
    ("gemma.modeling_gemma", "GemmaRMSNorm"),
]


@pytest.mark.parametrize(("module", "name"), NORMS_OF_TRANSFORMERS, ids=lambda x: x)
def test_norms_of_transformers(rewrite: Any, module: str, name: str) -> None:
    made = getattr(pytest.importorskip(f"transformers.models.{module}"), name)(K, EPS)
    made = made.bfloat16().requires_grad_(False)

    def body(self: Layer, x: Tensor) -> Any:
        y = made(x)
        return self.route(y), self.experts(y)

    assert rewrite(Layer(body), tokens(1, 5, K)).of(PASS) == [NORM]
