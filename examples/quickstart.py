"""Compile a model, and ask what the passes did."""

import torch

import compile_ext
from compile_ext.layers import ChannelFp8Linear


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(256, 8, bias=False).bfloat16()
        self.lm_head = ChannelFp8Linear(torch.randn(50257, 256))

    def forward(self, x):
        return self.lm_head(x), self.router(x).float().softmax(-1).topk(2)


model = Head()
with torch.inference_mode():
    compiled = torch.compile(model, backend="compile_ext")
    compiled(torch.randn(1, 256).bfloat16())
print(compile_ext.explain(compiled))
