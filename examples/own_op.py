"""Give an op of your own a contract, and it gets the passes that our ops get."""

import torch
from torch.library import Library, register_fake

import compile_ext
from compile_ext.testing import check_contract

# An op that quantizes x itself when `scale` is not asked for, and likes N in multiples of 8.
library = Library("mylib", "DEF")
library.define("gemm(Tensor x, Tensor w, Tensor? scale, bool scaled) -> Tensor")


def gemm(x, w, scale, scaled):
    return x @ w.t() * scale if scaled else x @ w.t()


library.impl("gemm", gemm, "CompositeExplicitAutograd")
register_fake("mylib::gemm", lambda x, w, scale, scaled: x.new_empty(x.shape[0], w.shape[0]))

compile_ext.register_contract(
    torch.ops.mylib.gemm.default,
    compile_ext.OpContract(
        gemm=compile_ext.Gemm(a="x", b="w", scale_b="scale"),
        align={"n": compile_ext.Align(8, pad={"w": 0, "scale": 1.0})},
        unread={"scale": lambda scaled, **_: not scaled},
    ),
)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(30, 16))

    def forward(self, x):
        return torch.ops.mylib.gemm(x, self.w, x.new_ones(1), False)


layer, x = Layer(), torch.randn(4, 16)
for scaled in (False, True):  # in a test of the op: run it, and prove the contract's claims
    print(check_contract(torch.ops.mylib.gemm.default, (x, layer.w, torch.rand(30), scaled)))
with torch.no_grad():
    compiled = torch.compile(layer, backend="compile_ext")
    torch.testing.assert_close(compiled(x), layer(x))
    layer.w.mul_(2)  # the padded copy follows the weight
    torch.testing.assert_close(compiled(x), layer(x))
print(compile_ext.explain(compiled))
