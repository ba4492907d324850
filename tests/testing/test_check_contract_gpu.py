"""On a GPU: a child that starts anew, and what an op reads before its PDL wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library

from compile_ext.ops import Gemm, OpContract, register_contract
from compile_ext.ops.errors import ContractError
from compile_ext.testing import check_contract

pytestmark = pytest.mark.gpu
NAMESPACE = "check_contract_gpu_tests"
LIBRARY = Library(NAMESPACE, "DEF")  # at the top level: the child imports this file

triton: Any = None
try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:
    pass
else:

    @triton.jit
    def _scale_kernel(x, w, out, n, EARLY: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(w + at, mask=at < n)  # the weight may be read before the wait
        if EARLY:
            value = tl.load(x + at, mask=at < n)
            tl.extra.cuda.gdc_wait()
        else:
            tl.extra.cuda.gdc_wait()
            value = tl.load(x + at, mask=at < n)
        tl.store(out + at, value * weight, mask=at < n)


def scale(x: Tensor, w: Tensor, early: bool) -> Tensor:
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 256),)
    kernel: Any = _scale_kernel
    kernel[grid](x, w, out, x.numel(), EARLY=early, BLOCK=256, launch_pdl=True)
    return out


def define(name: str, run: Any, contract: OpContract) -> None:
    LIBRARY.define(f"{name}(Tensor x, Tensor w) -> Tensor")
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    register_contract(getattr(getattr(torch.ops, NAMESPACE), name).default, contract)


PREWAIT = OpContract(gemm=Gemm(a="x", b="w"), prewait_reads=("w",))
define("waits", lambda x, w: scale(x, w, False), PREWAIT)
define("is_early", lambda x, w: scale(x, w, True), PREWAIT)
define("plain", lambda x, w: x * w, PREWAIT)  # without PDL: it starts when the one before ended
UNREAD = OpContract(unread={"w": lambda **_: True})
define("reads", lambda x, w: x + 0 * w, UNREAD)
define("illegal", lambda x, w: x[(w.isnan() * 10**9).long()], UNREAD)
OPS = getattr(torch.ops, NAMESPACE)


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(3000, device="cuda"), torch.randn(3000, device="cuda")


needs_pdl = pytest.mark.skipif(
    triton is None or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs Triton and compute capability 9.0",
)


@needs_pdl
@pytest.mark.parametrize("name", ["waits", "plain"])
def test_an_op_that_waits(name, inputs):
    report = check_contract(getattr(OPS, name).default, inputs)
    assert "prewait_reads w" in report.holds, str(report)


@needs_pdl
def test_an_op_that_reads_its_activation_before_the_wait(inputs):
    with pytest.raises(ContractError) as raised:
        check_contract(OPS.is_early.default, inputs)
    found = "prewait_reads w: argument 'x' written late by the kernel before: result["
    assert raised.value.found.startswith(found)
    assert "griddepcontrol.wait" in raised.value.fix


def test_a_false_claim_on_cuda(inputs):
    with pytest.raises(ContractError, match=r"argument 'w' filled with NaN: result\[0\] is nan"):
        check_contract(OPS.reads.default, inputs)


def test_a_kernel_that_breaks_the_context_breaks_the_child_alone(inputs):
    with pytest.raises(ContractError) as raised:
        check_contract(OPS.illegal.default, inputs)
    assert "argument 'w' filled with NaN" in raised.value.found
    assert float((inputs[0] * 0).nan_to_num(0).sum()) == 0  # the context of this process lives


def test_an_op_that_no_module_defines(inputs):
    library = Library(f"{NAMESPACE}_local", "DEF")
    library.define("local(Tensor x) -> Tensor")
    library.impl("local", lambda x: x + 1, "CompositeExplicitAutograd")
    op = getattr(torch.ops, f"{NAMESPACE}_local").local.default
    register_contract(op, OpContract())
    with pytest.raises(ContractError, match=r"no check_contract_gpu_tests_local::local.default in"):
        check_contract(op, (inputs[0],))
    library._destroy()
