"""What a manifest says of calls that a warmup cannot make, or cannot tell of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

import compile_ext
from compile_ext.manifest import NotCovered
from compile_ext.ops import registry
from compile_ext.ops.compile_unit import compiles_nothing
from compile_ext.ops.contract import OpContract
from compile_ext.ops.device import Target
from compile_ext.ops.third_party import CONTRACTS

ops = torch.ops.compile_ext_tests
W = torch.randn(16, 8)
NO_CONTRACT = "it has no contract: compile_ext.register_contract(op, OpContract(...))"
SAYS_NOT = "its contract does not say what it compiles: OpContract(compile_units=...)"


def collected(function: Callable[..., Any], *args: Any) -> compile_ext.Manifest:
    with torch.no_grad():
        return compile_ext.collect(function, *args)


def test_an_op_without_a_contract() -> None:
    manifest = collected(lambda x: ops.no_contract(x) + ops.no_contract.default(x), torch.ones(3))
    assert manifest.sites == ()
    modules = ("no_contract", "no_contract_default")  # the names of its nodes: it has no weight
    assert manifest.not_covered == (
        NotCovered("compile_ext_tests::no_contract", modules, NO_CONTRACT),
    )


def test_a_contract_that_does_not_say_what_is_compiled() -> None:
    manifest = collected(lambda x: ops.gemm(x, W, None, None, False), torch.randn(5, 8))
    assert [s.call.op for s in manifest.sites] == ["compile_ext_tests::gemm.default"]
    assert manifest.not_covered == (NotCovered("compile_ext_tests::gemm", ("W",), SAYS_NOT),)


def test_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    contracts = dict(registry._CONTRACTS)
    monkeypatch.setattr(registry, "_CONTRACTS", contracts)
    contracts[ops.no_contract.default] = OpContract(compile_units=compiles_nothing)
    manifest = collected(lambda x: ops.no_contract(x), torch.ones(3))
    assert [s.call.op for s in manifest.sites] == ["compile_ext_tests::no_contract.default"]
    assert manifest.not_covered == ()
    assert compiles_nothing(manifest.sites[0].call, Target((9, 0)), 8192) == ()


TORCH: dict[str, Callable[[Tensor], Any]] = {
    "functions": lambda x: F.linear(x, W).softmax(-1),
    "ops": lambda x: torch.ops.aten.mm(x, W.t()),
    "prims": lambda x: torch.ops.prims.mul(x, x),
    "a subgraph": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
}


@pytest.mark.parametrize("function", TORCH.values(), ids=TORCH)
def test_torch_compiles_its_own(function: Callable[[Tensor], Any]) -> None:
    assert collected(function, torch.randn(5, 8)) == compile_ext.Manifest()


def test_inside_a_transform() -> None:
    def mapped(x: Tensor) -> Tensor:
        return torch.vmap(lambda y: ops.no_contract(y) + 1)(x)

    manifest = collected(mapped, torch.randn(5, 8))
    assert [(x.op, x.reason) for x in manifest.not_covered] == [
        ("compile_ext_tests::no_contract", NO_CONTRACT)
    ]


def test_an_installed_version_with_another_schema() -> None:
    library = Library("fbgemm", "FRAGMENT")
    library.define("f8f8bf16_rowwise(Tensor XQ, Tensor scale) -> Tensor")
    library.impl("f8f8bf16_rowwise", lambda x, scale: x * scale, "CompositeExplicitAutograd")
    library.impl("f8f8bf16_rowwise", lambda x, scale: torch.empty_like(x), "Meta")
    try:
        manifest = collected(lambda x: torch.ops.fbgemm.f8f8bf16_rowwise(x, x), torch.randn(5, 8))
        (missing,) = manifest.not_covered
        assert missing.reason.startswith("the contract known for it does not fit: found argument")
    finally:
        registry._MISFITS.clear()
        library._destroy()


def test_packages_whose_kernels_come_compiled_say_so() -> None:
    says = {name.split("::")[0] for name, c in CONTRACTS.items() if c.compile_units is not None}
    says_not = {name.split("::")[0] for name, c in CONTRACTS.items() if c.compile_units is None}
    assert says == {"aten", "_C", "sgl_kernel", "fbgemm"}
    assert says_not == {"vllm", "sglang", "finegrained_fp8"}
