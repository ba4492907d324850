"""The last argument of every op: the kernel by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import compile_ext
from compile_ext.ops import define
from compile_ext.ops.errors import KernelError
from compile_ext.ops.quantize import quantize_fp8_per_token
from compile_ext.ops.scaled_mm import scaled_mm_ref

OP = torch.ops.compile_ext.scaled_mm


def operands() -> tuple[Any, ...]:
    a, scale_a = quantize_fp8_per_token(torch.randn(3, 64))
    b, scale_b = quantize_fp8_per_token(torch.randn(16, 64))
    return a, b, scale_a, scale_b, None, torch.float32


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """What ran, of a scaled_mm whose first kernel takes up to 4 tokens."""
    definition = define.definition_of(OP.default)
    assert definition is not None
    kernels, names = definition.kernels, []

    def run_as(name: str) -> Any:
        return lambda *args: (names.append(name), scaled_mm_ref(*args))[1]

    def why_not(a: Tensor, *_: Any) -> str | None:
        return None if a.shape[0] <= 4 else "takes up to 4 tokens"

    few = define.Kernel("few", why_not, run_as("few"))
    reference = define.Kernel("reference", define.never, run_as("reference"))
    object.__setattr__(definition, "kernels", (few, reference))  # the dataclass is frozen
    yield names
    object.__setattr__(definition, "kernels", kernels)


def test_runs_the_one_that_is_named(ran: list[str]) -> None:
    args = operands()
    results = [OP(*args), OP(*args, "few"), OP(*args, "reference"), OP(*args, pinned="reference")]
    assert ran == ["few", "few", "reference", "reference"]
    assert all(torch.equal(x, results[0]) for x in results)


def test_a_kernel_that_the_op_lacks(ran: list[str]) -> None:
    with pytest.raises(KernelError) as error:
        OP(*operands(), "cutlass")
    assert error.value.where == "scaled_mm"
    assert error.value.found == "kernel 'cutlass'"
    assert error.value.wanted == "few, reference"
    assert ran == []


def test_a_kernel_that_cannot_run_the_call(ran: list[str]) -> None:
    a, b, scale_a, *rest = operands()
    many = (a.repeat(2, 1), b, scale_a.repeat(2, 1), *rest)
    OP(*many)
    assert ran == ["reference"]
    with pytest.raises(KernelError) as error:
        OP(*many, "few")
    assert error.value.found.endswith("cannot run this call: takes up to 4 tokens")
    assert ran == ["reference"]


def test_the_error_comes_at_trace_time() -> None:
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in operands()]
        with pytest.raises(KernelError) as error:
            OP(*args, "aten")
        assert OP(*args, "reference").shape == (3, 16)
    assert "runs on CUDA, the tensors are on cpu" in error.value.found


@torch.no_grad()
def test_in_a_compiled_graph(ran: list[str]) -> None:
    """Through a rewrite, too: N = 50 is padded."""

    class Model(torch.nn.Module):
        def __init__(self, kernel: str | None) -> None:
            super().__init__()
            self.kernel = kernel
            q, scale = quantize_fp8_per_token(torch.randn(50, 64))
            self.w = torch.nn.Parameter(q, requires_grad=False)
            self.scale = torch.nn.Parameter(scale, requires_grad=False)

        def forward(self, a: Tensor, scale_a: Tensor) -> Any:
            return OP(a, self.w, scale_a, self.scale, None, torch.float32, self.kernel)

    a, _, scale_a, *_ = operands()
    for kernel, runs in ((None, "few"), ("reference", "reference")):
        model = Model(kernel)
        compiled = torch.compile(
            model, backend="compile_ext", options={"compile_ext.inner": "eager"}
        )
        assert compiled(a, scale_a).shape == (3, 50)
        assert ran[-1] == runs
        [row] = compile_ext.explain(compiled).rows
        assert row.site is not None
        assert (row.site.n, row.site.kernel) == (64, runs)


@torch.no_grad()
def test_under_inductor(ran: list[str]) -> None:
    """Its fallback for an op passes keywords on beside its own."""
    args = operands()
    for name in ("few", "reference"):
        compiled = torch.compile(lambda a, *rest, name=name: OP(a, *rest, pinned=name) + 1)
        torch.testing.assert_close(compiled(*args), OP(*args) + 1)
        assert ran[-2] == name  # the last is the eager call
