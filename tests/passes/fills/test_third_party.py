"""Contracts of other packages' ops, found by name, in a graph."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

import compile_ext

PASS = "strip_placeholder_fills"
GONE = (True, "out is overwritten in full: what filled it is gone")


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def args() -> tuple[Tensor, Tensor]:
    """Activation [m, k] and weight [n, k]."""
    return fp8(16, 32), fp8(48, 32)


CALLS = {
    "function": torch._scaled_mm,
    "packet": torch.ops.aten._scaled_mm,
    "overload": torch.ops.aten._scaled_mm.default,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale_of_a_wide_result_is_unread(rewrite: Any, call: Any, dtype: torch.dtype) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        one = torch.ones(())
        return call(x, w.t(), one, one, scale_result=torch.ones(1), out_dtype=dtype)

    got = rewrite(model, *args())
    assert got.of(PASS) == [
        (True, "scale_result is not read: None"),
        (True, "full(1), which it is given, is a constant"),
    ]
    assert "ones" not in got.graph


def test_scale_of_an_fp8_result_is_read(rewrite: Any) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        one = torch.ones(())
        return torch._scaled_mm(
            x, w.t(), one, one, scale_result=one, out_dtype=torch.float8_e4m3fn
        ).float()

    got = rewrite(model, *args())
    assert got.of(PASS) == [
        (False, "scale_result is read"),
        (True, "full(1), which it is given, is a constant"),
    ]


def test_out_overload(rewrite: Any) -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        one = torch.ones(())
        out = torch.zeros(16, 48, dtype=torch.bfloat16)
        torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, out=out)
        return out

    assert_expected_inline(
        rewrite(model, *args()).graph,
        """\
arg0: float8_e4m3fn[48, 32]
arg1: float8_e4m3fn[16, 32]
arg2: float32[] = full(1)
%0: bfloat16[16, 48] = empty([16, 48], device=cpu, dtype=bfloat16)
%1: float8_e4m3fn[32, 48] = .t(arg0)
%2: bfloat16[16, 48] = _scaled_mm(arg1, %1, arg2, arg2, out=%0, out_dtype=bfloat16)
return [%0]""",
    )


def test_site() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        one = torch.ones(())
        return torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16)

    compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
    given = args()
    with torch.no_grad():
        compiled(*given)
    [row] = compile_ext.explain(compiled).rows
    assert row.site is not None
    assert (row.site.op, row.site.m, row.site.n, row.site.k) == (
        "aten::_scaled_mm",
        (16, 16),
        48,
        32,
    )


# vLLM 0.33's op, in a process of its own: a namespace stays taken, and a contract stays found.
PROGRAM = """
import sys, torch
from torch.library import Library, register_fake
import compile_ext

schema, call, forbidden = sys.argv[1:4]
library = Library("_C", "DEF")
library.define("cutlass_scaled_mm" + schema)

def run(out, a, b, *scales):
    out.copy_((a.float() @ b.float() * scales[0] * scales[1]).to(out.dtype))

library.impl("cutlass_scaled_mm", run, "CompositeExplicitAutograd")
register_fake("_C::cutlass_scaled_mm", lambda *args: None, lib=library)
op = eval(call)

def model(a, b):
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    op(out, a, b, torch.ones(1), torch.ones(1), *([None] if "bias" in schema else []))
    return out

a = torch.randn(16, 40).to(torch.float8_e4m3fn)
b = torch.randn(48, 40).to(torch.float8_e4m3fn).t()
compiled = torch.compile(model, backend="compile_ext", options={"compile_ext.inner": "eager"})
with torch.no_grad():
    assert torch.equal(compiled(a, b), model(a, b))
    out = torch.zeros(16, 48, dtype=torch.bfloat16)
for row in compile_ext.explain(compiled).rows:
    for d in row.decisions:
        print(row.op, "*" if d.fired else "-", d.pass_name, d.detail)
print([name for name in forbidden.split(",") if name in sys.modules])
"""
SCHEMA = "(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"
OTHER = "(Tensor! out, Tensor x, Tensor b, Tensor a_scales, Tensor b_scales) -> ()"


def decisions(schema: str, call: str = "torch.ops._C.cutlass_scaled_mm") -> list[str]:
    packages = "vllm,sgl_kernel,sglang,fbgemm_gpu,deep_gemm"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, schema, call, packages],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, imported = done.stdout.splitlines()
    assert imported == "[]"  # looking a contract up imports no package
    return [line for line in lines if PASS in line or "contract" in line]


CONSTANT = f"_C::cutlass_scaled_mm * {PASS} full(1), which it is given, is a constant"


@pytest.mark.slow
@pytest.mark.parametrize("overload", ["", ".default"])
def test_vllm_schema(overload: str) -> None:
    assert decisions(SCHEMA, f"torch.ops._C.cutlass_scaled_mm{overload}") == [
        f"_C::cutlass_scaled_mm * {PASS} {GONE[1]}",
        CONSTANT,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("overload", ["", ".default"])
def test_another_schema_is_a_reason_and_no_error(overload: str) -> None:
    found = decisions(OTHER, f"torch.ops._C.cutlass_scaled_mm{overload}")
    assert found[0] == CONSTANT
    assert found[1].startswith(
        "_C::cutlass_scaled_mm - collect_sites the contract known for it does not fit: found"
        " argument 'a' in gemm, which the schema lacks"
    )
