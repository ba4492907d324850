"""register_contract for ops of other packages, with each refusal; the contracts of our ops."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.library import Library

import compile_ext
from compile_ext.ops import Align, Gemm, OpContract, Pad, contract_of, register_contract, registry
from compile_ext.ops.contract import Memory
from compile_ext.ops.define import Kernel, define_op, definition_of, never
from compile_ext.ops.errors import CompileExtError, ContractError

NAMESPACE = "contract_tests"
GEMM_ARGUMENTS = (
    "(Tensor x, Tensor w, Tensor? scale, Tensor? bias, int flags, Tensor(a!)? out=None) -> Tensor"
)
ARGUMENTS = "x, w, scale, bias, flags, out"
GEMM = Gemm(a="x", b="w")


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The namespace of a third-party library, with a gemm, its M = 1 form and other ops."""
    monkeypatch.setattr(registry, "_CONTRACTS", dict(registry._CONTRACTS))
    library = Library(NAMESPACE, "DEF")
    library.define(f"gemm{GEMM_ARGUMENTS}")
    library.define(f"gemm_m1{GEMM_ARGUMENTS}")
    library.define("gemm_other(Tensor x, Tensor w) -> Tensor")
    library.define("renamed(Tensor y, Tensor w) -> Tensor")
    yield getattr(torch.ops, NAMESPACE)
    library._destroy()


def align(dim: str = "n", multiple: Any = 16, **pad: Any) -> OpContract:
    return OpContract(gemm=GEMM, align={dim: Align(multiple, pad=pad or {"w": 0, "x": 0})})


REFUSED: dict[str, tuple[OpContract, str, str, str]] = {  # contract, found, wanted, fix
    "gemm_a": (
        OpContract(gemm=Gemm(a="input", b="w")),
        "argument 'input' in gemm, which the schema lacks", f"one of {ARGUMENTS}", "gemm(Tensor x"),
    "gemm_scale": (
        OpContract(gemm=Gemm(a="x", b="w", scale_b="scales")),
        "argument 'scales' in gemm", f"one of {ARGUMENTS}", "name an argument of"),
    "gemm_integer": (
        OpContract(gemm=Gemm(a="x", b="w", bias="flags")),
        "argument 'flags' in gemm, which is int", "Tensor argument: x, w, scale, bias, out", "out"),
    "gemm_layout": (
        OpContract(gemm=Gemm(a="x", b="w", layout="tn")),  # type: ignore[arg-type]
        "gemm layout 'tn'", "'nt' or 'nn'", "'nt' for b [n, k]"),
    "align_pad": (
        align(w=0, scales=1.0),
        "argument 'scales' in align['n'].pad", f"one of {ARGUMENTS}", "name an argument of"),
    "gemm_twice": (
        OpContract(gemm=Gemm(a="x", b="x")),
        "gemm names 'x' 2 times", "one role an argument", "its own argument"),
    "gemm_m_axis_from_the_end": (
        OpContract(gemm=Gemm(a="x", b="w", m_axis=-2)),
        "gemm with m_axis -2", "at least 0, or None", "count the axes of 'x' from 0"),
    "gemm_m_axis_bool": (
        OpContract(gemm=Gemm(a="x", b="w", m_axis=True)),
        "gemm with m_axis True", "an integer of at least 0", "or leave it out"),
    "gemm_m_axis_float": (
        OpContract(gemm=Gemm(a="x", b="w", m_axis=1.0)),  # type: ignore[arg-type]
        "gemm with m_axis 1.0", "an integer of at least 0", "or leave it out"),
    "gemm_tuple": (
        OpContract(gemm=("x", "w")),  # type: ignore[arg-type]
        "gemm = ('x', 'w')", "a Gemm", "Gemm(a=..., b=...)"),
    "prewait_text": (
        OpContract(gemm=GEMM, prewait_reads="w"),  # type: ignore[arg-type]
        "prewait_reads = 'w'", "a tuple of argument names", "prewait_reads=('w',)"),
    "compile_units": (
        OpContract(compile_units=3),  # type: ignore[arg-type]
        "compile_units = 3", "a callable", "leave it out"),
    "pad_axis": (
        align(w=Pad(0, axis="n")),  # type: ignore[arg-type]
        "align['n'] pads 'w' along axis 'n'", "an integer or None", "as a number"),
    "pad_inf": (align(w=float("inf")), "pads 'w' with inf", "a finite number", "0 for data"),
    "pad_bool": (align(w=True), "pads 'w' with True", "a finite number", "0 for data"),
    "unread": (
        OpContract(unread={"scale_a": lambda **_: True}),
        "argument 'scale_a' in unread", f"one of {ARGUMENTS}", "name an argument of"),
    "overwritten": (
        OpContract(overwritten=("result",)),
        "argument 'result' in overwritten", f"one of {ARGUMENTS}", "name an argument of"),
    "prewait_reads": (
        OpContract(prewait_reads=("w", "weight")),
        "argument 'weight' in prewait_reads", f"one of {ARGUMENTS}", "name an argument of"),
    "prewait_activation": (
        OpContract(gemm=GEMM, prewait_reads=("w", "x")),
        "prewait_reads with 'x', the activation", "no kernel before", "leave it out"),
    "unread_no_predicate": (
        OpContract(unread={"scale": True}),  # type: ignore[dict-item]
        "unread['scale'] = True", "predicate", "write unread={'scale': lambda **_: True}"),
    "unread_mutable": (
        OpContract(unread={"out": lambda **_: True}),
        "unread argument 'out', which the schema mutates", "does not write", "in overwritten"),
    "overwritten_immutable": (
        OpContract(overwritten=("x",)),
        "overwritten argument 'x', which the schema does not mutate", "Tensor(a!)", "mutable in"),
    "align_without_gemm": (
        OpContract(align={"n": Align(16, pad={"w": 0})}),
        "align without gemm", "gemm=Gemm(", "say which arguments"),
    "align_no_align": (
        OpContract(gemm=GEMM, align={"n": 16}),  # type: ignore[dict-item]
        "align['n'] = 16", "an Align", "write align={'n': Align("),
    "align_m": (align("m"), "align['m']", "'n' or 'k'", "pad it inside the op"),
    "align_zero": (align("n", 0), "align['n'] with multiple 0", "at least 1", "in elements"),
    "align_negative": (align("k", -16), "align['k'] with multiple -16", "at least 1", "elements"),
    "align_float": (align("k", 16.0), "align['k'] with multiple 16.0", "integer", "in elements"),
    "align_bool": (align("k", True), "align['k'] with multiple True", "integer", "in elements"),
    "align_n_without_b": (
        align("n", bias=0), "align['n'] without a pad value for 'w'", "values for w", "add 'w': 0"),
    "align_k_without_a": (
        align("k", w=0), "align['k'] without a pad value for 'x'", "for x, w", "add 'x': 0"),
    "align_n_pads_a": (
        align("n", w=0, x=0), "align['n'] pads 'x'", "arguments that have N", "'x' is [m, k]"),
    "align_nan": (
        align("n", w=0, bias=float("nan")),
        "pads 'bias' with nan", "a finite number", "1.0 for scales"),
    "align_text": (
        align("n", w="0"), "align['n'] pads 'w' with '0'", "a finite number", "0 for data"),
    "align_block_0": (
        align("n", w=0, scale=Pad(1.0, block=0)), "'scale' with block 0", "at least 1", "elements"),
    "memory_list": (
        OpContract(gemm=GEMM, memory=["w"]),  # type: ignore[arg-type]
        "memory = ['w']", "a dict", "write memory={...}"),
    "memory_number": (
        OpContract(gemm=GEMM, memory={"w": 16}),  # type: ignore[dict-item]
        "memory['w'] = 16", "a Memory", "write memory={'w': Memory(address=16)}"),
    "memory_name": (
        OpContract(gemm=GEMM, memory={"weight": Memory(16)}),
        "argument 'weight' in memory, which the schema lacks", f"one of {ARGUMENTS}", "name an"),
    "memory_integer": (
        OpContract(gemm=GEMM, memory={"flags": Memory(16)}),
        "argument 'flags' in memory, which is int", "a Tensor argument", "leave it out"),
    "memory_activation": (
        OpContract(gemm=GEMM, memory={"x": Memory(16)}),
        "memory['x'], the activation", "weights, scales and biases", "leave it out"),
    "memory_without_gemm": (
        OpContract(memory={"w": Memory(16)}),
        "memory['w'] without gemm", "gemm=Gemm(", "say which arguments"),
    "memory_address_0": (
        OpContract(gemm=GEMM, memory={"w": Memory(address=0)}),
        "memory['w'] with address 0", "at least 1", "bytes for address"),
    "memory_stride_float": (
        OpContract(gemm=GEMM, memory={"w": Memory(stride=8.0)}),  # type: ignore[arg-type]
        "memory['w'] with stride 8.0", "an integer", "elements for stride"),
    "memory_stride_bool": (
        OpContract(gemm=GEMM, memory={"w": Memory(stride=True)}),
        "memory['w'] with stride True", "an integer", "elements for stride"),
}  # fmt: skip


def assert_refuses(op: Any, declared: OpContract, found: str, wanted: str, fix: str) -> None:
    with pytest.raises(ContractError) as raised:
        register_contract(op, declared)
    refusal = raised.value
    assert refusal.where == f"contract of {NAMESPACE}.gemm.default"
    assert found in refusal.found
    assert wanted in refusal.wanted
    assert fix in refusal.fix
    for part in (refusal.where, refusal.found, refusal.wanted, refusal.fix):
        assert part in str(refusal)


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_and_registers_nothing(case, ops):
    assert_refuses(ops.gemm.default, *REFUSED[case])
    assert contract_of(ops.gemm.default) is None


def test_refusal_keeps_the_earlier_contract(ops):
    first = OpContract(gemm=GEMM)
    register_contract(ops.gemm.default, first)
    assert_refuses(ops.gemm.default, *REFUSED["gemm_a"])
    assert contract_of(ops.gemm.default) is first


@pytest.mark.parametrize("what", ["packet", "name", "function"])
def test_refuses_what_is_no_overload(what, ops):
    op = {"packet": ops.gemm, "name": f"{NAMESPACE}::gemm", "function": torch.mm}[what]
    before = dict(registry._CONTRACTS)
    with pytest.raises(ContractError) as raised:
        register_contract(op, OpContract())
    assert f"register_contract({op})" in str(raised.value)
    assert type(op).__name__ in raised.value.found
    assert "torch.ops.mylib.gemm.default" in raised.value.fix
    assert before == registry._CONTRACTS


@pytest.mark.parametrize("variant", ["gemm_other", "renamed"])
def test_refuses_an_m1_variant_of_another_schema(variant, ops):
    declared = OpContract(gemm=GEMM, m1_variant=getattr(ops, variant).default)
    wanted = f"the same arguments as {NAMESPACE}::gemm("
    assert_refuses(ops.gemm.default, declared, f"m1_variant {NAMESPACE}::{variant}(", wanted, "sch")
    assert contract_of(ops.gemm.default) is None


def test_refuses_an_m1_variant_that_is_a_packet_or_without_gemm(ops):
    declared = OpContract(gemm=GEMM, m1_variant=ops.gemm_m1)
    found, fix = "m1_variant of type OpOverloadPacket", "torch.ops.mylib.gemm_m1.default"
    assert_refuses(ops.gemm.default, declared, found, "an operator overload", fix)
    declared = OpContract(m1_variant=ops.gemm_m1.default)
    assert_refuses(ops.gemm.default, declared, "m1_variant without gemm", "gemm=Gemm(", "M tokens")
    assert contract_of(ops.gemm.default) is None


def test_accepts_a_contract_with_every_field(ops):
    declared = OpContract(
        gemm=Gemm(a="x", b="w", layout="nn", scale_b="scale", bias="bias", m_axis=0),
        align={
            "n": Align(16, pad={"w": 0, "scale": Pad(1.0, axis=0, block=128), "bias": 0}),
            "k": Align(1, pad={"x": 0, "w": 0.0}),
        },
        memory={"w": Memory(address=16, stride=8), "bias": Memory(address=16)},
        unread={"scale": lambda flags, **_: flags == 0},
        overwritten=("out",),
        prewait_reads=("w", "scale", "bias"),
        m1_variant=ops.gemm_m1.default,
        compile_units=lambda site, target, max_tokens: (),
    )
    compile_ext.register_contract(ops.gemm.default, declared)
    assert contract_of(ops.gemm.default) is declared
    assert contract_of(ops.gemm_m1.default) is None  # a contract belongs to one overload
    assert declared.align["n"].pads() == {"w": Pad(0), "scale": Pad(1.0, 0, 128), "bias": Pad(0)}


def test_every_field_may_be_left_out_and_a_second_contract_replaces(ops):
    empty = OpContract()
    register_contract(ops.gemm.default, empty)
    assert contract_of(ops.gemm.default) is empty
    assert (empty.gemm, empty.m1_variant, empty.compile_units) == (None, None, None)
    assert (dict(empty.align), dict(empty.memory), dict(empty.unread)) == ({}, {}, {})
    assert (empty.overwritten, empty.prewait_reads) == ((), ())
    second = OpContract(gemm=GEMM)
    register_contract(ops.gemm.default, second)
    assert contract_of(ops.gemm.default) is second


@pytest.mark.parametrize(
    "value",
    [OpContract(gemm=GEMM), GEMM, Align(16), Pad(0), Memory()],
    ids=lambda v: type(v).__name__,
)
def test_contracts_are_immutable(value):
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


OWN = torch.ops.compile_ext
SCALED = Gemm(a="a", b="b", scale_a="scale_a", scale_b="scale_b", bias="bias")
GROUPED = Gemm(a="a", b="b", scale_a="scale_a", scale_b="scale_b")
MASKED, BATCHED = dataclasses.replace(GROUPED, m_axis=1), dataclasses.replace(GROUPED, m_axis=0)
ROUTER = Gemm(a="a", b="b", bias="bias")


@pytest.mark.parametrize(
    ("op", "gemm", "prewait_reads", "m1_variant"),
    [
        (OWN.scaled_mm.default, SCALED, ("b", "scale_b", "bias"), None),
        (
            OWN.block_scaled_mm.default,
            SCALED,
            ("b", "scale_b", "bias"),
            OWN.block_scaled_mm_m1.default,
        ),
        (OWN.block_scaled_mm_m1.default, SCALED, ("b", "scale_b", "bias"), None),
        (OWN.grouped_block_scaled_mm.default, GROUPED, ("b", "scale_b"), None),
        (OWN.grouped_block_scaled_mm_masked.default, MASKED, ("b", "scale_b"), None),
        (OWN.fp8_bmm.default, BATCHED, ("b", "scale_b"), None),
        (OWN.router_gemm.default, ROUTER, ("b", "bias"), OWN.router_gemm_m1.default),
        (OWN.router_gemm_m1.default, ROUTER, ("b", "bias"), None),
        (OWN.rms_norm.default, None, ("weight",), None),
        (OWN.add_rms_norm.default, None, ("weight",), None),
        (OWN.attn_residual.default, None, ("weight", "query"), None),
        (OWN.rms_norm_quantize_fp8.default, None, ("weight",), None),
        (OWN.add_rms_norm_quantize_fp8.default, None, ("weight",), None),
    ],
    ids=[
        "scaled_mm",
        "block_scaled_mm",
        "block_scaled_mm_m1",
        "grouped_block_scaled_mm",
        "grouped_block_scaled_mm_masked",
        "fp8_bmm",
        "router_gemm",
        "router_gemm_m1",
        "rms_norm",
        "add_rms_norm",
        "attn_residual",
        "rms_norm_quantize_fp8",
        "add_rms_norm_quantize_fp8",
    ],
)
def test_contract_of_our_op(op, gemm, prewait_reads, m1_variant):
    declared = contract_of(op)
    assert declared is not None
    assert declared.gemm == gemm  # layout nt, the default
    assert declared.prewait_reads == prewait_reads
    assert declared.m1_variant == m1_variant
    assert declared.overwritten == ()


def own_contract(name: str) -> OpContract:
    declared = contract_of(getattr(OWN, name).default)
    assert declared is not None
    return declared


def test_alignment_of_our_ops():
    plain = own_contract("scaled_mm")
    assert {dim: (x.multiple, x.pads()) for dim, x in plain.align.items()} == {
        "n": (16, {"b": Pad(0), "scale_b": Pad(1.0), "bias": Pad(0)}),
        "k": (16, {"a": Pad(0), "b": Pad(0)}),
    }
    rows, columns = Pad(1.0, axis=0, block=128), Pad(1.0, axis=1, block=128)
    blocks = own_contract("block_scaled_mm")
    assert {dim: (x.multiple, x.pads()) for dim, x in blocks.align.items()} == {
        "n": (16, {"b": Pad(0), "scale_b": rows, "bias": Pad(0)}),
        "k": (16, {"a": Pad(0), "b": Pad(0), "scale_a": columns, "scale_b": columns}),
    }
    assert own_contract("router_gemm").align == {}


def test_unread_predicate_of_block_scaled_mm_looks_at_the_dtype_of_a():
    (name, unread), *others = own_contract("block_scaled_mm").unread.items()
    assert (name, others) == ("scale_a", [])
    others = {"b": None, "scale_a": None, "scale_b": None, "bias": None, "out_dtype": None}
    assert unread(a=torch.empty(1, dtype=torch.bfloat16), **others) is True
    assert unread(a=torch.empty(1, dtype=torch.float8_e4m3fn), **others) is False
    assert own_contract("scaled_mm").unread == {}


def test_every_op_of_ours_has_a_contract_and_a_reference_kernel():
    gemms = ("scaled_mm", "block_scaled_mm", "router_gemm", "router_gemm_m1")
    grouped = ("grouped_block_scaled_mm", "grouped_block_scaled_mm_masked", "fp8_bmm")
    for name in (*gemms, *grouped):
        assert own_contract(name).gemm is not None
        definition = definition_of(getattr(OWN, name).default)
        assert definition is not None
        [reference] = [k for k in definition.kernels if k.name == "reference"]
        assert reference.why_not is never
    assert contract_of(torch.ops.aten.mm.default) is None
    assert definition_of(torch.ops.aten.mm.default) is None


def test_an_op_without_a_reference_is_not_defined():
    kernel = Kernel("aten", why_not=never, run=torch.clone)
    with pytest.raises(AssertionError, match=r"a kernel .* must be the reference"):
        define_op(
            "no_reference(Tensor x) -> Tensor",
            check=lambda x: None,
            fake=torch.empty_like,
            kernels=(kernel,),
            contract=OpContract(),
        )
    assert not hasattr(OWN, "no_reference")


def test_errors_survive_a_process_boundary():
    # Workers of a process pool send errors pickled.
    error = ContractError("gemm", "f", "w", "x")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ContractError
    assert isinstance(copy, CompileExtError)
    assert (str(copy), copy.where, copy.found) == (str(error), "gemm", "f")
    assert (copy.wanted, copy.fix) == ("w", "x")


def test_a_registered_contract_cannot_change_through_its_dicts(ops):
    aligns: dict[str, Align] = {}
    pads: dict[str, float | Pad] = {"w": 0, "x": 0}
    made = OpContract(gemm=GEMM, align=aligns)
    aligns["n"] = Align(16, pad=pads)
    assert dict(made.align) == {}
    pads["w"] = float("nan")
    assert aligns["n"].pad["w"] == 0
    with pytest.raises(TypeError):
        made.align["n"] = aligns["n"]  # type: ignore[index]


def test_refuses_none_and_the_op_as_its_own_variant(ops):
    with pytest.raises(ContractError, match="found a NoneType; wanted an OpContract"):
        register_contract(ops.gemm.default, None)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="the op itself"):
        register_contract(ops.gemm.default, OpContract(gemm=GEMM, m1_variant=ops.gemm.default))
    assert contract_of(ops.gemm.default) is None
