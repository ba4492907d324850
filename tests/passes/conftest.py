"""Fixtures of the pass tests: third-party ops with contracts, and the rewritten graph as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule
from torch.library import Library, register_fake

import compile_ext
from compile_ext import backend as backend_module
from compile_ext.layers import BlockFp8Linear
from compile_ext.ops import define
from compile_ext.ops.add_rms_norm import OP as ADD_RMS_NORM
from compile_ext.ops.add_rms_norm_quantize_fp8 import OP as ADD_RMS_NORM_QUANTIZE
from compile_ext.ops.attn_residual import OP as ATTN_RESIDUAL
from compile_ext.ops.block_scaled_mm import OP as BLOCK_SCALED_MM
from compile_ext.ops.contract import Memory
from compile_ext.ops.rms_norm import OP as RMS_NORM
from compile_ext.ops.rms_norm_quantize_fp8 import OP as RMS_NORM_QUANTIZE
from compile_ext.ops.rms_norm_router import OP as RMS_NORM_ROUTER
from compile_ext.ops.rms_norm_router_topk import OP as RMS_NORM_ROUTER_TOPK
from compile_ext.ops.router_topk import OP as ROUTER_TOPK
from compile_ext.passes import Decision, print_graph

_LIBRARY = Library("compile_ext_tests", "DEF")


def _define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    name = schema.split("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    register_fake(f"compile_ext_tests::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.compile_ext_tests, name).default


def _gemm(x: torch.Tensor, w: torch.Tensor, scale: Any, bias: Any, quantized: bool) -> torch.Tensor:
    out = F.linear(x, w, bias)
    return out * scale if quantized else out


def _gemm_fake(
    x: torch.Tensor, w: torch.Tensor, scale: Any, bias: Any, quantized: bool
) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


def _gemm_nn(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x @ w


def _gemm_nn_fake(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def _bmm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("mhk,hnk->mhn", x, w).contiguous()


def _bmm_fake(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:2], w.shape[1])


def _copy_out(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


def _gemm_fp8(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # Sums of products of FP8 numbers are exact in float64: their order makes no difference.
    return (x.double() @ w.double().t() * scale).float()


def _gemm_fp8_fake(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0], dtype=torch.float32)


_GEMM_ARGS = "(Tensor x, Tensor w, Tensor? scale, Tensor? bias, bool quantized) -> Tensor"
GEMM_M1 = _define(f"gemm_m1{_GEMM_ARGS}", _gemm, _gemm_fake)
GEMM = _define(f"gemm{_GEMM_ARGS}", _gemm, _gemm_fake)
GEMM_NN = _define("gemm_nn(Tensor x, Tensor w, Tensor s) -> Tensor", _gemm_nn, _gemm_nn_fake)
GEMM_FP8 = _define(
    "gemm_fp8(Tensor x, Tensor w, Tensor scale) -> Tensor", _gemm_fp8, _gemm_fp8_fake
)
GEMM_MEMORY = _define(
    "gemm_memory(Tensor x, Tensor w, Tensor? bias) -> Tensor",
    F.linear,
    lambda x, w, bias: x.new_empty(x.shape[0], w.shape[0]),
)
BMM = _define("bmm(Tensor x, Tensor w) -> Tensor", _bmm, _bmm_fake)
BMM_M1 = _define("bmm_m1(Tensor x, Tensor w) -> Tensor", _bmm, _bmm_fake)
MIXED = _define(
    "mixed(Tensor x, SymInt[] sizes, float factor, ScalarType dtype, str text) -> Tensor",
    lambda x, sizes, factor, dtype, text: (x * factor).to(dtype),
    lambda x, sizes, factor, dtype, text: x.new_empty(x.shape, dtype=dtype),
)
NO_CONTRACT = _define("no_contract(Tensor x) -> Tensor", torch.clone, torch.empty_like)
COPY_OUT = _define(
    "copy_out(Tensor x, Tensor(a!) out) -> ()",
    _copy_out,
    lambda x, out: None,
)

compile_ext.register_contract(MIXED, compile_ext.OpContract())
compile_ext.register_contract(
    GEMM,
    compile_ext.OpContract(
        gemm=compile_ext.Gemm(a="x", b="w", scale_b="scale", bias="bias"),
        align={
            "n": compile_ext.Align(8, pad={"w": 0, "bias": 0, "scale": 1.0}),
            "k": compile_ext.Align(4, pad={"x": 0, "w": 0}),
        },
        unread={"scale": lambda quantized, **_: not quantized},
        prewait_reads=("w", "bias"),
        m1_variant=GEMM_M1,
    ),
)
compile_ext.register_contract(
    GEMM_M1,
    compile_ext.OpContract(gemm=compile_ext.Gemm(a="x", b="w", scale_b="scale", bias="bias")),
)
compile_ext.register_contract(
    GEMM_NN,
    compile_ext.OpContract(
        gemm=compile_ext.Gemm(a="x", b="w", layout="nn"),
        align={"n": compile_ext.Align(8, pad={"w": 0})},
        unread={"s": lambda **_: True},
    ),
)
compile_ext.register_contract(
    GEMM_FP8,
    compile_ext.OpContract(
        gemm=compile_ext.Gemm(a="x", b="w", scale_a="scale"),
        align={"k": compile_ext.Align(4, pad={"x": 0, "w": 0})},
    ),
)
compile_ext.register_contract(
    GEMM_MEMORY,
    compile_ext.OpContract(
        gemm=compile_ext.Gemm(a="x", b="w", bias="bias"),
        align={"n": compile_ext.Align(4, pad={"w": 0, "bias": 0})},
        memory={"w": Memory(address=16, stride=8), "bias": Memory(address=16)},
    ),
)
compile_ext.register_contract(
    BMM,  # x [m, h, k], w [h, n, k]
    compile_ext.OpContract(
        gemm=compile_ext.Gemm(a="x", b="w", m_axis=0),
        align={"n": compile_ext.Align(8, pad={"w": 0})},
        memory={"w": Memory(stride=8)},
        m1_variant=BMM_M1,
    ),
)
compile_ext.register_contract(COPY_OUT, compile_ext.OpContract(overwritten=("out",)))


@dataclass
class Rewritten:
    """What the backend made of a model: the graphs as text, the reports, and a way to call it."""

    modules: list[GraphModule] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def graph(self) -> str:
        """The last graph."""
        return print_graph(self.modules[-1])

    def of(self, pass_name: str) -> list[tuple[bool, str]]:
        """(fired, detail) of each decision of one pass, in all graphs."""
        return [(d.fired, d.detail) for d in self.decisions if d.pass_name == pass_name]


Rewrite = Callable[..., Rewritten]


@pytest.fixture
def rewrite(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rewrite]:
    """``rewrite(model, *args)``: compile with inner eager, check the result against eager, return
    the rewrite.

    Values, shapes, dtypes and strides must equal eager's; ``tolerance`` is the allowed difference
    of a value.
    """
    torch._dynamo.reset()
    kept = Rewritten()
    original = backend_module.compile_inner
    real_context = backend_module.PassContext

    def compile_inner(gm: GraphModule, *args: Any) -> Any:
        kept.modules.append(gm)
        kept.decisions += [d for e in contexts[-1].report.entries for d in e.decisions]
        return original(gm, *args)

    contexts: list[Any] = []

    def context(*args: Any) -> Any:
        contexts.append(real_context(*args))
        return contexts[-1]

    monkeypatch.setattr(backend_module, "compile_inner", compile_inner)
    monkeypatch.setattr(backend_module, "PassContext", context)

    def run(
        model: Callable[..., Any],
        *args: Any,
        tolerance: float = 0.0,
        options: dict[str, Any] | None = None,
        grad: bool = False,
        **compile_options: Any,
    ) -> Rewritten:
        with torch.set_grad_enabled(grad):
            want = model(*args)
            compiled = torch.compile(
                model,
                backend="compile_ext",
                options={"compile_ext.inner": "eager", **(options or {})},
                **compile_options,
            )
            got = compiled(*args)
        _assert_same(got, want, tolerance)
        return kept

    yield run
    torch._dynamo.reset()


def _assert_same(got: Any, want: Any, tolerance: float) -> None:
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            _assert_same(g, w, tolerance)
        return
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=tolerance, equal_nan=True)


@pytest.fixture
def norm_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for the CPU that ``fuse_norm_quantize`` sees: without one it stands back there. The
    ops themselves run their reference, as ever."""
    _pretend_kernel(monkeypatch, RMS_NORM_QUANTIZE, ADD_RMS_NORM_QUANTIZE)


@pytest.fixture
def router_norm_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for ``lower_router_norm``."""
    _pretend_kernel(monkeypatch, RMS_NORM, ADD_RMS_NORM, ATTN_RESIDUAL)


class Fp8Model(nn.Module):
    """``body(self, *activations)`` with a norm's weight and two linears."""

    def __init__(self, body: Callable[..., Any], k: int = 256) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.randn(k).bfloat16(), requires_grad=False)
        self.up = BlockFp8Linear(torch.randn(2 * k, k) / 16)
        self.down = BlockFp8Linear(torch.randn(64, k) / 16)
        self.router = nn.Parameter(torch.randn(8, k).bfloat16(), requires_grad=False)

    def forward(self, *activations: torch.Tensor) -> Any:
        return self.body(self, *activations)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.w, 1e-6)


@pytest.fixture
def fp8_model() -> type[Fp8Model]:
    """The class of these models."""
    return Fp8Model


@pytest.fixture
def gemm_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for ``quantize_activations``."""
    _pretend_kernel(monkeypatch, BLOCK_SCALED_MM)


@pytest.fixture
def choice_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for ``lower_router_topk``."""
    _pretend_kernel(monkeypatch, ROUTER_TOPK)


@pytest.fixture
def fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for ``fuse_router``, of norm and router alone."""
    _pretend_kernel(monkeypatch, RMS_NORM_ROUTER)


@pytest.fixture
def fused_choice_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of the choice of experts too."""
    _pretend_kernel(monkeypatch, RMS_NORM_ROUTER_TOPK)


def _pretend_kernel(monkeypatch: pytest.MonkeyPatch, *ops: torch._ops.OpOverload) -> None:
    for op in ops:
        (reference,) = [k for k in define._DEFINITIONS[op].kernels if k.name == "reference"]
        kernels = (define.Kernel("test", define.never, reference.run), reference)
        monkeypatch.setitem(define._DEFINITIONS, op, define.OpDefinition(op, kernels))
