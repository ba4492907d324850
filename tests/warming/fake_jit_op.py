"""An op of another package, whose contract says that the fake compiler compiles for it: a unit for
each of 1, 2 and 3 tokens."""

from __future__ import annotations

import fake_jit
import torch
from torch import Tensor

from compile_ext.manifest import Manifest, ManifestSite
from compile_ext.ops.call_site import Call, CallSite, TensorForm
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.contract import Gemm, OpContract
from compile_ext.ops.device import Target
from compile_ext.ops.registry import register_contract

_LIBRARY = torch.library.Library("fake_jit", "FRAGMENT")
_LIBRARY.define("gemm(Tensor a, Tensor b) -> Tensor")


def _gemm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


_LIBRARY.impl("gemm", _gemm, "CPU")
_LIBRARY.impl("gemm", _gemm, "Meta")
OP = torch.ops.fake_jit.gemm.default
FAILS, COMPILES_NOTHING = 666, 13  # values of N


def compile_units(site: CallSite, target: Target, max_tokens: int) -> tuple[CompileUnit, ...]:
    if site.n == COMPILES_NOTHING:
        return ()
    words = "fail" if site.n == FAILS else "plain"
    return tuple(
        CompileUnit(fake_jit.FAKE, words, f"n{site.n}-m{m}", (Call(site, m),))
        for m in range(1, min(max_tokens, 3) + 1)
    )


register_contract(OP, OpContract(gemm=Gemm(a="a", b="b", layout="nt"), compile_units=compile_units))


def manifest(*ns: int) -> Manifest:
    return Manifest(tuple(ManifestSite(_call(n), (f"layers.{n}.proj",)) for n in ns))


def _call(n: int) -> CallSite:
    a = TensorForm("bfloat16", ("M", 16), (16, 1))
    b = TensorForm("bfloat16", (n, 16), (16, 1))
    return CallSite("fake_jit::gemm.default", (1, None), (("a", a), ("b", b)), n, 16)
