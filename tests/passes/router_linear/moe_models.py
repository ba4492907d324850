"""Mixture-of-experts models of transformers, built from their configurations with tiny sizes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip(
    "transformers", reason="needs the extra 'transformers': pip install 'compile-ext[transformers]'"
)

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
SHARED_EXPERTS = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}
# One model of each kind: its name in transformers, and what its configuration has beyond SIZES.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 6},
    "GptOss": {"num_local_experts": 6},
    "DeepseekV3": {**SHARED_EXPERTS, **LATENT_ATTENTION, "n_group": 2, "topk_group": 1},
    "Glm4Moe": {**SHARED_EXPERTS, "n_group": 1, "topk_group": 1},
    "Llama4": {"num_local_experts": 6, "intermediate_size_mlp": 128},
}
# Where a layer has its experts, and these their router.
ROUTERS = {
    **dict.fromkeys(MODELS, "mlp.gate"),
    "GptOss": "mlp.router",
    "Llama4": "feed_forward.router",
}


def tiny(name: str, layers: int = 1) -> Any:
    """A model with random weights in bfloat16, for inference."""
    sizes = {**SIZES, "num_hidden_layers": layers, **MODELS[name]}
    kind = f"{name}Text" if name == "Llama4" else name
    config = getattr(transformers, f"{kind}Config")(
        **{k: v for k, v in sizes.items() if v is not None}
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p.normal_(0, 0.05)
    return model


def experts_of(name: str) -> Any:
    """The mixture of experts of a layer: the router, and what it routes to."""
    return tiny(name).model.layers[0].get_submodule(ROUTERS[name].split(".")[0])


class SecondHalf(nn.Module):
    """Of a decoder layer: the residual's sum, the norm, the experts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        layer = tiny(name).model.layers[0]
        self.norm = layer.post_attention_layernorm
        self.experts = layer.get_submodule(ROUTERS[name].split(".")[0])

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        h = residual + x
        found = self.experts(self.norm(h))
        out = found[0] if isinstance(found, tuple) else found
        return h + out.view(h.shape)
