"""Kernels that turn out in the middle of a call to be unable to run: the next one takes the call
and all later ones, and the reason is said."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compile_ext
from compile_ext.doctor import examine
from compile_ext.layers import BlockFp8Linear
from compile_ext.ops import deep_gemm_support, define, fp8_bmm, triton_support
from compile_ext.ops.errors import KernelError, KernelUnavailable

FP8 = torch.float8_e4m3fn
REASON = "the compiler fails"
CPU = torch.device("cpu")


def kernel_of(op: str, name: str) -> define.Kernel:
    definition = define.definition_of(getattr(torch.ops.compile_ext, op).default)
    assert definition is not None
    return next(k for k in definition.kernels if k.name == name)


class Failing:
    """A first kernel that would run anywhere; counts its calls."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        self.calls += 1
        raise self.error


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Failing]:
    def make(op: str, error: Exception, name: str = "triton") -> Failing:
        kernel, run = kernel_of(op, name), Failing(error)
        monkeypatch.setattr(kernel, "run", run)
        monkeypatch.setattr(kernel, "why_not", define.never)
        monkeypatch.setattr(kernel, "failures", {})
        return run

    return make


def operands() -> tuple[Any, ...]:
    a, b = torch.randn(5, 2, 128).to(FP8), torch.randn(2, 30, 128).to(FP8)
    return a, b, torch.rand(5, 2, 1), torch.rand(2, 1, 1)


def test_the_next_kernel_takes_this_call_and_later_ones(failing: Any) -> None:
    args = operands()
    want = fp8_bmm(*args)
    kernel, run = kernel_of("fp8_bmm", "triton"), failing("fp8_bmm", KernelUnavailable(REASON))
    for _ in range(3):
        assert torch.equal(fp8_bmm(*args), want)
    assert run.calls == 1
    assert kernel.failures == {CPU: REASON}
    definition = define.definition_of(torch.ops.compile_ext.fp8_bmm.default)
    assert definition is not None
    chosen, reasons = definition.kernel_for(*args, torch.bfloat16)
    assert chosen.name == "reference"
    assert reasons["triton"] == REASON


def test_another_device_is_not_concerned(failing: Any) -> None:
    failing("fp8_bmm", KernelUnavailable(REASON))
    kernel = kernel_of("fp8_bmm", "triton")
    kernel.give_up(torch.device("cuda:1"), REASON)
    kernel.give_up(torch.device("cuda:0"), "another")
    assert kernel.why_not(torch.empty(1)) is None
    assert kernel.failures == {torch.device("cuda:1"): REASON, torch.device("cuda:0"): "another"}


def test_a_pinned_kernel_is_an_error_each_time(failing: Any) -> None:
    run = failing("fp8_bmm", KernelUnavailable(REASON))
    for _ in range(2):
        with pytest.raises(KernelError, match=f"cannot run this call: {REASON}"):
            torch.ops.compile_ext.fp8_bmm(*operands(), torch.bfloat16, "triton")
    assert run.calls == 1


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), RuntimeError("illegal address"), KeyError(1)]
)
def test_other_errors_go_through(failing: Any, error: Exception) -> None:
    run = failing("fp8_bmm", error)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            fp8_bmm(*operands())
        assert raised.value is error
    assert run.calls == 2
    assert kernel_of("fp8_bmm", "triton").failures == {}


def test_under_autocast_too(failing: Any) -> None:
    args = operands()
    want = fp8_bmm(*args)
    failing("fp8_bmm", KernelUnavailable(REASON))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fp8_bmm(*args), want)


def test_explain_and_doctor_say_it(failing: Any) -> None:
    layer, x = BlockFp8Linear(torch.randn(32, 128)), torch.randn(5, 128).bfloat16()
    want = layer(x)
    for name in ("triton_small_m", "triton"):
        failing("block_scaled_mm", KernelUnavailable(REASON), name)
    compiled = torch.compile(layer, backend="compile_ext", options={"compile_ext.inner": "eager"})
    with torch.no_grad():
        assert torch.equal(compiled(x), want)
    [row] = compile_ext.explain(compiled).rows
    assert row.site is not None
    assert row.site.kernel == "triton_small_m (gave up: triton_small_m)"
    assert f"triton_small_m: {REASON}" in row.site.passed_over
    assert f"kernel triton_small_m: {REASON}" in str(compile_ext.explain(compiled))
    said = {(x.name, x.use): x.reason for x in examine()}
    for name in ("triton_small_m on cpu", "triton on cpu"):
        assert said[name, "block_scaled_mm"] == f"gave up in this process: {REASON}"


@pytest.mark.gpu
def test_while_a_cuda_graph_is_captured(failing: Any) -> None:
    args = tuple(x.cuda() for x in operands())
    want = torch.ops.compile_ext.fp8_bmm(*args, torch.bfloat16, "triton")  # compiles it
    run = failing("fp8_bmm", KernelUnavailable(REASON), "deep_gemm")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8_bmm(*args)
    graph.replay()
    assert torch.equal(out, want)
    assert run.calls == 1


def triton_error(error: Exception) -> str | None:
    return triton_support._why_not_compiled(error)


def test_what_triton_fails_to_compile() -> None:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError

    no_space = OSError(28, "No space left on device", "/home/x/.triton")
    for error, text in (
        (CompilationError("x = y", ast.Name("y"), "y is not defined"), "y is not defined"),
        (OutOfResources(300000, 232448, "shared memory"), "out of resource: shared memory"),
        (PTXASError("no such target"), "PTXAS error: no such target"),
        (RuntimeError("PassManager::run failed\nmore"), "(PassManager::run failed)"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), "is invalid"),
        (no_space, "No space left on device: '/home/x/.triton'); TRITON_CACHE_DIR names"),
        (subprocess.CalledProcessError(1, ["gcc"]), "Command '['gcc']' returned non-zero"),
    ):
        reason = triton_error(error)
        assert reason is not None
        assert reason.startswith("Triton does not compile it (")
        assert text in reason
    assert triton_error(ImportError("libtriton.so")) == "Triton does not load (libtriton.so)"
    for other in (
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory"),
        InterpreterError("IndexError"),
        TypeError("missing argument"),
        AssertionError(),
    ):
        assert triton_error(other) is None


def test_run_of_turns_them_into_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "compile_ext.ops.batched_block_scaled_mm_triton"
    run = triton_support.run_of("batched_block_scaled_mm_triton", "run_bmm")
    fake = type(sys)("fake")
    monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(fake, "run_bmm", Failing(PermissionError(13, "denied")), raising=False)
    with pytest.raises(KernelUnavailable, match=r"Triton does not compile it .*denied"):
        run()
    monkeypatch.setattr(fake, "run_bmm", lambda *args, **options: (args, options))
    assert run(1, prefetch=True) == ((1,), {"prefetch": True})
    monkeypatch.setattr(fake, "run_bmm", Failing(TypeError("ours")))
    with pytest.raises(TypeError, match="ours"):
        run()


JIT = "/deepgemm/csrc/apis/../jit_kernels/impls/../../jit"
COMPILE = {  # what the library says, and what the reason keeps of it
    f'Assertion error ({JIT}/compiler.hpp:208): false and "NVCC compilation failed"': (
        'false and "NVCC compilation failed"'),
    f"Assertion error ({JIT}/../utils/system.hpp:74): created": "created",
    f"NVRTC error ({JIT}/compiler.hpp:264): NVRTC_ERROR_COMPILATION": "NVRTC_ERROR_COMPILATION",
    f"CUDA driver error ({JIT}/handle.hpp:61): 301 (CUDA_ERROR_FILE_NOT_FOUND, file not found)": (
        "301 (CUDA_ERROR_FILE_NOT_FOUND, file not found)"),
    "filesystem error: cannot create directories: Read-only file system [/x]": (
        "filesystem error: cannot create directories: Read-only file system [/x]"),
}  # fmt: skip
OTHER = [
    f"CUDA driver error ({JIT}/handle.hpp:61): 700 (CUDA_ERROR_ILLEGAL_ADDRESS, an illegal)",
    "CUDA runtime error (/deepgemm/csrc/apis/../jit_kernels/impls/x.hpp:9): 2 (cudaErrorMemory)",
    "Assertion error (/deepgemm/csrc/apis/gemm.hpp:88): m == m_",
    "something else",
    "",
]


def library(deep_gemm: pytest.MonkeyPatch, error: Exception) -> Failing:
    run = Failing(error)
    deep_gemm.setattr(sys.modules["deep_gemm"], "fp8_einsum", run, raising=False)
    return run


@pytest.mark.parametrize("text", COMPILE)
def test_what_deep_gemm_fails_to_compile(text: str, deep_gemm: pytest.MonkeyPatch) -> None:
    library(deep_gemm, RuntimeError(text + "\nmore"))
    with pytest.raises(KernelUnavailable) as raised:
        deep_gemm_support.call("fp8_einsum", 1, 2)
    assert str(raised.value).startswith(f"DeepGEMM does not compile it ({COMPILE[text]}): what")


@pytest.mark.parametrize("text", OTHER)
def test_other_errors_of_deep_gemm_go_through(text: str, deep_gemm: pytest.MonkeyPatch) -> None:
    error = RuntimeError(text)
    library(deep_gemm, error)
    with pytest.raises(RuntimeError) as raised:
        deep_gemm_support.call("fp8_einsum")
    assert raised.value is error


def test_a_release_without_the_function(deep_gemm: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelUnavailable, match="this release of DeepGEMM has no fp8_einsum: pip"):
        deep_gemm_support.call("fp8_einsum")


def test_deep_gemm_gives_way_to_the_next_kernel(
    deep_gemm: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = library(deep_gemm, RuntimeError(next(iter(COMPILE))))
    kernel = kernel_of("fp8_bmm", "deep_gemm")
    monkeypatch.setattr(kernel, "failures", {})
    monkeypatch.setattr(kernel, "why_not", define.never)  # as on a Hopper GPU
    args = operands()
    want = torch.ops.compile_ext.fp8_bmm(*args, torch.bfloat16, "reference")
    for _ in range(2):
        assert torch.equal(fp8_bmm(*args), want)
    assert run.calls == 1
    assert "NVCC compilation failed" in kernel.failures[CPU]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 1", "does not run (PLACE: no release)"),
        ("echo broken >&2; exit 127", "does not run (PLACE: broken)"),
        ("echo release 13.0; exit 1", "does not run (PLACE: release 13.0)"),
        ("echo release 11.8", "is too old (PLACE: 11.8, wanted 12.3)"),
        ("echo release 12.3", None),
    ],
)
def test_the_compiler_is_asked_once(
    script: str, said: str | None, deep_gemm: pytest.MonkeyPatch
) -> None:
    place = deep_gemm_support.nvcc()
    assert place is not None
    place.write_text(f"#!/bin/sh\n{script}\n")
    reason = deep_gemm_support.why_not()
    if said is None:
        assert reason is None
    else:
        said = said.replace("PLACE", str(place))
        assert reason is not None
        assert reason.startswith(f"DeepGEMM compiles with nvcc, which {said}: install NVIDIA's")
