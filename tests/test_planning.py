"""From sites to units: the kernel of each M, none twice, and what is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from call_sites import H200, block_scaled, dense, router, site, units

from compile_ext import planning
from compile_ext.manifest import Manifest, ManifestSite, NotCovered
from compile_ext.ops import cute_support, deep_gemm_support, device_tables, triton_support
from compile_ext.ops.call_site import Call, CallSite, TensorForm
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.contract import OpContract
from compile_ext.ops.define import Kernel, definition_of, own_arguments
from compile_ext.ops.device import Target, as_if_on
from compile_ext.planning import Missing, plan

DECODER, RANDOM_SITES = (
    Path(__file__).with_name(name) for name in ("plan_decoder.py", "plan_random_sites.py")
)


def _run(script: Path) -> str:
    """What it prints, in a process without Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def manifest(*sites: CallSite) -> Manifest:
    return Manifest(tuple(ManifestSite(x, (f"layers.{i}",)) for i, x in enumerate(sites)))


@pytest.mark.parametrize("n", [64, 576, 2112, 24576])
@pytest.mark.parametrize("k", [7168, 1536])
def test_the_kernel_of_each_m(n: int, k: int) -> None:
    """Where ranges meet is found by halving: the same as asking at each M."""
    s = block_scaled(n, k)
    definition = definition_of(s.overload)
    assert definition is not None
    [planned] = plan(manifest(s), H200, 1500).sites
    ranges = [(low, high) for low, high, _ in planned.kernels]
    assert [x[0] for x in ranges] == [1, *(high + 1 for _, high in ranges[:-1])]
    assert ranges[-1][1] == 1500
    with as_if_on(H200):
        for low, high, name in planned.kernels:
            for m in {low, high, *range(low, high, 7)}:
                arguments = {**s.make(m, "meta"), "pinned": None}
                kernel, _ = definition.kernel_for(*own_arguments(arguments))
                assert kernel.name == name, m


def test_a_limit_between_asked_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = device_tables.Ranges((1, 1001), (1000, 5000), ("reference", "aten"))
    rows: Any = {("router_gemm", 64, 128): ranges}
    monkeypatch.setattr(device_tables, "ranges_for", lambda x: rows)
    [planned] = plan(manifest(router(64, 128, m=(1, None))), H200, 8192).sites
    assert planned.kernels == ((1, 1000, "reference"), (1001, 8192, "aten"))


def test_a_kernel_of_whole_blocks_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM's masked GEMM takes groups of 128 rows and their multiples, and nothing between."""
    groups, n, k = 4, 128, 512
    s = site(
        "grouped_block_scaled_mm_masked", (2, None), n, k,
        a=TensorForm("float8_e4m3fn", (groups, "M", k), (f"{k}*M", k, 1)),
        b=dense("float8_e4m3fn", groups, n, k),
        scale_a=TensorForm("float32", (groups, "M", 4), ("4*M", 4, 1)),
        scale_b=dense("float32", groups, 1, 4), masked_m=dense("int32", groups), expected_m=5,
        out_dtype=torch.bfloat16,
    )  # fmt: skip
    monkeypatch.setattr(deep_gemm_support, "why_not", lambda: None)
    monkeypatch.setattr(Kernel, "compile_units", lambda *_: ())
    [planned] = plan(manifest(s), H200, 1500).sites
    whole = [(low, high) for low, high, name in planned.kernels if name == "deep_gemm"]
    assert whole == [(m, m) for m in range(128, 1501, 128)]
    between = [(low, high) for low, high, name in planned.kernels if name != "deep_gemm"]
    assert between == [(2, 127), *((m + 1, min(m + 127, 1500)) for m in range(128, 1501, 128))]


def test_a_pinned_kernel_is_the_one() -> None:
    s = block_scaled(64, 128)
    named = dict(s.arguments) | {"pinned": "reference"}
    [planned] = plan(manifest(replace(s, arguments=tuple(named.items()))), H200, 99).sites
    assert planned.kernels == ((1, 99, "reference"),)


def test_the_range_of_m_is_that_of_the_site_up_to_max_tokens() -> None:
    sites = router(64, 128, m=(5, 5)), router(64, 128, m=(2, 40)), router(64, 128, m=(100, None))
    planned = plan(manifest(*sites), H200, 30)
    found = {x.site.call.m: (x.kernels[0][0], x.kernels[-1][1]) for x in planned.sites}
    assert found == {(5, 5): (5, 5), (2, 40): (2, 30)}
    [left] = planned.not_covered
    assert left.reason == "its calls have 100 tokens or more, max_tokens is 30"


def test_an_op_that_nobody_registered_is_left_out_with_the_reason() -> None:
    stranger = replace(router(64, 128), op="elsewhere::mm.default")
    found = plan(manifest(stranger, router(64, 128)), H200, 8)
    assert found.not_covered == (
        NotCovered(
            "elsewhere::mm",
            ("layers.0",),
            "no module of this process registers elsewhere::mm.default: import the one that does",
        ),
    )
    assert len(found.sites) == 1


def test_a_compiler_that_is_not_here_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deep_gemm_support, "why_not", lambda: "install DeepGEMM")
    monkeypatch.setattr(cute_support, "why_no_compiler", lambda: "install CuTe DSL")
    monkeypatch.setattr(triton_support, "is_installed", lambda: False)
    both = manifest(router(64, 128), block_scaled(64, 128))
    mm, gemm = "compile_ext::block_scaled_mm", "compile_ext::router_gemm"
    assert plan(both, H200, 8).missing == (
        Missing("cute", "install CuTe DSL", (gemm,)),
        Missing("deep_gemm", "install DeepGEMM", (mm,)),
        Missing("triton", "Triton is not installed: pip install triton", (mm, gemm)),
    )
    # DeepGEMM's kernels here are for Hopper alone: elsewhere it is not missed.
    assert [x.compiler for x in plan(both, Target((8, 9)), 8).missing] == ["cute", "triton"]


class Jit:
    name, needs_device = "jit", False


class Jit2:
    name, needs_device = "jit2", False


def as_any(x: Any) -> Any:
    """What no type checker would let through."""
    return x


def test_a_contract_of_another_package_says_what_it_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def compile_units(s: CallSite, target: Target, max_tokens: int) -> tuple[CompileUnit, ...]:
        asked.append((s.n, target, max_tokens))
        jit: Any = Jit()
        calls = [(Call(s, m),) for m in (64, 1)]
        return tuple(CompileUnit(jit, "mm", f"mm-{c[0].m}", c) for c in calls)

    contract = OpContract(compile_units=compile_units)
    monkeypatch.setattr(planning, "definition_of", lambda op: None)
    monkeypatch.setattr(planning, "contract_of", lambda op: contract)
    found = plan(manifest(router(64, 128), router(64, 256)), H200, 77)
    assert asked == [(64, H200, 77), (64, H200, 77)]
    assert [(x.key, x.calls[0].m) for x in found.units] == [("mm-1", 1), ("mm-64", 64)]
    assert [x.keys for x in found.sites] == [("mm-64", "mm-1")] * 2


def test_a_contract_that_fails_costs_its_site_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_units(s: CallSite, *_: Any) -> tuple[CompileUnit, ...]:
        raise RuntimeError("no idea") if s.k == 256 else KeyError("k")

    contract = OpContract(compile_units=compile_units)
    monkeypatch.setattr(planning, "definition_of", lambda op: None)
    monkeypatch.setattr(planning, "contract_of", lambda op: contract)
    found = plan(manifest(router(64, 128), router(64, 256)), H200, 77)
    assert [x.reason for x in found.not_covered] == [
        "its kernels cannot be planned (KeyError: 'k')",
        "its kernels cannot be planned (RuntimeError: no idea)",
    ]


def test_a_range_without_a_limit_inside_begins_with_its_first_number() -> None:
    s = router(64, 128, m=(300, 500))
    [planned] = plan(manifest(s), H200, 8192).sites
    assert [planned.kernels[0][0], planned.kernels[-1][1]] == [300, 500]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (lambda jit, call: None, "TypeError: 'NoneType' object is not iterable"),
        (lambda jit, call: ["mm"], "TypeError: compile_units gives a str, wanted a CompileUnit"),
        (
            lambda jit, call: [CompileUnit(jit, "mm", "mm-1", ())],
            "TypeError: unit mm-1 has calls=(), wanted one Call or more",
        ),
        (
            lambda jit, call: [CompileUnit(jit, "mm", "mm-1", as_any(("M = 1",)))],
            "TypeError: unit mm-1 has calls=('M = 1',), wanted one Call or more",
        ),
        (
            lambda jit, call: [CompileUnit(jit, "mm", as_any(5), call)],
            "TypeError: a unit has key=5, wanted a printable str",
        ),
        (
            lambda jit, call: [CompileUnit(jit, "mm", "mm-\udcff", call)],
            "TypeError: a unit has key='mm-\\udcff', wanted a printable str",
        ),
        (
            lambda jit, call: [CompileUnit(jit, as_any(None), "mm-1", call)],
            "TypeError: a unit has kernel=None, wanted a printable str",
        ),
        (
            lambda jit, call: [CompileUnit(jit, "mm", "mm-1", call, seconds=as_any(None))],
            "TypeError: unit mm-1 has seconds=None, wanted a number",
        ),
        (
            lambda jit, call: [CompileUnit(as_any(Jit2()), "mm", "taken", call)],
            "ValueError: jit2's key taken is one of jit's too",
        ),
    ],
)
def test_a_contract_that_gives_no_units_costs_its_site_alone(
    monkeypatch: pytest.MonkeyPatch, given: Any, reason: str
) -> None:
    jit: Any = Jit()

    def compile_units(s: CallSite, *_: Any) -> Any:
        call = (Call(s, 1),)
        return given(jit, call) if s.k == 256 else (CompileUnit(jit, "mm", "taken", call),)

    monkeypatch.setattr(planning, "definition_of", lambda op: None)
    contract = OpContract(compile_units=compile_units)
    monkeypatch.setattr(planning, "contract_of", lambda op: contract)
    found = plan(manifest(router(64, 128), router(64, 256)), H200, 77)
    assert [x.key for x in found.units] == ["taken"]
    assert [x.reason for x in found.not_covered] == [f"its kernels cannot be planned ({reason})"]


def test_each_call_of_any_site_finds_its_kernels_planned() -> None:
    """Random forms of calls: at each M what the op launches, against what was planned."""
    found = json.loads(_run(RANDOM_SITES))
    assert [x for x in found if x["missing"] or x["idle"] or x["not_covered"]] == []
    assert len({x["op"] for x in found if x["units"]}) >= 5  # that the sites are no empty ones
    assert {k for x in found for k in x["kernels"]} >= {"aten", "triton", "deep_gemm"}


def test_a_kernel_that_compiles_nothing_has_no_units() -> None:
    assert units(router(64, 128), "reference", 64) == ()
    s = site("column_major", (1, None), None, None, scale=dense("float32", "M", 4))
    [planned] = plan(manifest(s), H200, 64).sites
    assert (planned.kernels, planned.keys) == (((1, 64, "reference"),), ())


def test_a_demo_decoder_on_meta_tensors() -> None:
    """Without weights, GPU or interpreter: the graphs of a GPU, and what they compile there."""
    found = json.loads(_run(DECODER))
    assert found["ops"] == [
        "add_rms_norm", "add_rms_norm_quantize_fp8", "block_scaled_mm", "block_scaled_mm_m1",
        "column_major", "rms_norm_quantize_fp8", "rms_norm_router", "router_gemm", "scaled_mm",
    ]  # fmt: skip
    assert found["not_covered"] == []
    assert found["hot_first"] == sorted(found["hot_first"])
    assert found["hot_first"][0] == 1
    assert found["same"]
    # Of 24 that four shapes and two ops need: shapes share what they compile alike.
    assert found["kernels"]["_small_m_kernel"] == 15
    assert found["kernels"]["_rms_norm_router_kernel"] == 1
    assert found["names"]["block_scaled_mm"] == [[2, 64, "triton_small_m"], [65, 8192, "aten"]]
