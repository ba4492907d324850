"""What the tests of lower_router_linear build their graphs from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PASS = "lower_router_linear"
IN_FLOAT32 = (True, "logits stay in float32")
# Eager rounds the logits to bfloat16 (2^-9 relative; they stay below 8), the rewritten graph does
# not.
LOGITS = 8 * 2.0**-9


class Router(nn.Module):
    """``body(x, w)``, and with ``bias`` ``body(x, w, bias)``."""

    def __init__(
        self,
        body: Any,
        n: int = 16,
        k: int = 32,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.randn(n, k).to(dtype) / 4)
        self.bias = nn.Parameter(torch.randn(n).to(dtype)) if bias else None

    def forward(self, x: Tensor) -> Any:
        return self.body(x, self.w) if self.bias is None else self.body(x, self.w, self.bias)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()
