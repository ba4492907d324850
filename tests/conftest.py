"""Set-up of every test, what the tests of the ops share (error bounds, opcheck, refusals), and
derivations of plain functions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_ext.ops import deep_gemm_nvcc, deep_gemm_support, errors

# Triton's interpreter runs its kernels on CPU tensors. It has to be asked for before Triton is
# imported, which Inductor does.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Two workers on two cores would otherwise wait for each other in OpenMP barriers.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Random data is the same in each run and does not depend on the tests before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """No test sees a graph, a counter or a recompile limit that another test left."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):  # importing it takes seconds, a reset 0.1 ms
        dynamo.reset()
        sys.modules["torch._dynamo.utils"].counters.clear()


@pytest.fixture(autouse=True)
def no_variable_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A variable that still names a test's folder would misdirect a library in later tests."""
    yield
    if folder := request.node.funcargs.get("tmp_path"):
        assert [name for name, value in os.environ.items() if str(folder) in value] == []


@pytest.fixture
def fresh_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DeepGEMM is looked for anew, and its compiler too, in this test and after it: a real DeepGEMM
    that compiled with a test's nvcc would leave an entry without a kernel in the user's cache."""
    for name in (deep_gemm_nvcc.COMPILER, deep_gemm_nvcc.REAL):
        monkeypatch.setenv(name, "")  # so that what it was comes back
        monkeypatch.delenv(name)
    monkeypatch.setattr(deep_gemm_nvcc, "_was_first", None)
    deep_gemm_support.why_not.cache_clear()
    yield
    deep_gemm_support.why_not.cache_clear()


AssertGemmClose = Callable[[Tensor, Tensor, Tensor, int], None]


@pytest.fixture
def assert_gemm_close() -> AssertGemmClose:
    """``(actual, exact, magnitude, k)``: a GEMM with float32 accumulation against a float64 one.

    ``magnitude`` is what ``exact`` becomes with the absolute value of every operand.
    """

    def check(actual: Tensor, exact: Tensor, magnitude: Tensor, k: int) -> None:
        assert actual.shape == exact.shape
        assert actual.is_contiguous()
        assert torch.equal(actual.isnan(), exact.isnan())
        # k products and sums in float32, two scales and a bias, in any order: each rounds by 2^-24
        # of at most the sum of magnitudes (Higham, Accuracy and Stability, section 3.1).
        accumulation = (k + 4) * 2.0**-24 * magnitude
        # One rounding to the output's dtype: half an ulp, or half the smallest subnormal.
        info = torch.finfo(actual.dtype)
        rounding = info.eps / 2 * (exact.abs() + accumulation) + info.tiny * info.eps / 2
        excess = (actual.double() - exact).abs() - accumulation - rounding
        assert not (excess > 0).any(), f"{excess.nan_to_num(0).max()} above the bound"

    return check


OpCheck = Callable[[Any, tuple[Any, ...]], None]


@pytest.fixture
def opcheck(monkeypatch: pytest.MonkeyPatch) -> OpCheck:
    """``torch.library.opcheck``, which compares FP8 tensors with an allclose that CPUs lack."""
    allclose = torch.allclose

    def allclose_fp8(x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> bool:
        if x.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        return allclose(x, y, *args, **kwargs)

    def check(op: Any, args: tuple[Any, ...]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "allclose", allclose_fp8)
            results = torch.library.opcheck(op, args)
        assert set(results.values()) == {"SUCCESS"}
        assert len(results) == 4  # schema, autograd registration, fake tensor, AOT dispatch

    return check


AssertRefused = Callable[..., None]
FIXES = {
    errors.DtypeError: "pass {} as",
    errors.RankError: "{0}.reshape(-1, {0}.shape[-1])",
    errors.ShapeError: "reshape or rebuild {}",
    errors.LayoutError: "{}.contiguous()",
    errors.DeviceError: "move {} with .to(",
    errors.GradError: "torch.no_grad() or torch.inference_mode()",
}


@pytest.fixture
def assert_refused() -> AssertRefused:
    """``(op, valid, bad)``: refused eagerly, on fakes, and as torch.compile traces.

    ``valid`` holds arguments by name; ``bad`` replaces one of them: (name, value, error, found,
    wanted), and the fix where it is not that of FIXES.
    """

    def check(op: Callable[..., Any], valid: dict[str, Any], bad: tuple[Any, ...]) -> None:
        name, value, error, found, wanted, *fix = bad
        texts = (found, wanted, *(fix or [FIXES[error].format(name)]))
        args = tuple({**valid, name: value}.values())

        def assert_raises(call: Callable[[], Any]) -> None:
            with pytest.raises(error) as raised:
                call()
            refusal = raised.value
            assert type(refusal) is error
            assert refusal.where == op.__name__
            for text, part in zip(texts, (refusal.found, refusal.wanted, refusal.fix), strict=True):
                assert text in part
                assert part in str(refusal)

        assert_raises(lambda: op(*args))
        from torch._dynamo.exc import TorchDynamoException  # seconds: only where needed
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args]
            assert_raises(lambda: op(*fakes))
        # Dynamo wraps what a fake raises in an error of its own: class and text must be in it.
        with pytest.raises(TorchDynamoException) as traced:
            torch.compile(op, backend="eager", fullgraph=True)(*args)
        for text in (error.__name__, op.__name__, *texts):
            assert text in str(traced.value)

    return check


Derive = Callable[[Callable[..., Tensor]], Any]


@pytest.fixture
def derive() -> Derive:
    """The derivation of what a function of parameters computes."""
    from compile_ext.passes.derivation import derivation_of  # seconds: only where needed

    def derive(function: Callable[..., Tensor]) -> Any:
        nodes = list(torch.fx.symbolic_trace(function).graph.nodes)
        sources = [n for n in nodes if n.op == "placeholder"]
        calls = [n for n in nodes if n.op.startswith("call_")]
        return derivation_of(calls, sources, calls[-1])

    return derive
