"""Inputs of every kind: each works, or is refused with what was found, wanted and a fix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_ext.ops import Align, Gemm, OpContract
from compile_ext.ops.errors import ContractError
from compile_ext.testing import ContractReport, check_contract

X = torch.arange(6.0)
SCHEMA = "op(Tensor x, int n=2, *, Tensor? y=None) -> Tensor"
BITS = torch.arange(8, dtype=torch.uint8)


@pytest.fixture
def op(define):
    return define(SCHEMA, lambda x, n=2, y=None: x + n, OpContract())


def refused(op, inputs, found: str, wanted: str, fix: str) -> None:
    with pytest.raises(ContractError) as raised:
        check_contract(op, inputs)
    error = raised.value
    assert error.where == f"check_contract({op})"
    for text, part in ((found, error.found), (wanted, error.wanted), (fix, error.fix)):
        assert text in part


def test_what_is_no_op_or_has_no_contract():
    refused(torch.ops.aten.mm, (X,), "a OpOverloadPacket", "one operator overload", "gemm.default")
    fix = "register_contract(aten.mm.default"
    refused(torch.ops.aten.mm.default, (X, X), "an op without a contract", "has one", fix)


def test_arguments_that_do_not_fit_the_schema(op):
    refused(op, (X, 1, X), "3 positional arguments", "at most 2: ['x', 'n']", "a dict")
    refused(op, (), "no value for ['x']", "op(Tensor x, int n=2", "as the schema does")
    refused(op, {"x": X, "z": 1}, "unknown arguments ['z']", "op(Tensor x", "name each")
    refused(op, X, "inputs of type Tensor", "a sequence of arguments", "pass (x, w, ...)")
    refused(op, "x", "inputs of type str", "a sequence of arguments", "pass (x, w, ...)")
    with pytest.raises(RuntimeError, match="for argument 'n' but instead found type 'str'"):
        check_contract(op, (X, "two"))


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), "5", 0, -1, True, None, 1e10])
def test_a_timeout_that_is_no_number_of_seconds(op, timeout):
    with pytest.raises(ContractError) as raised:
        check_contract(op, (X,), timeout=timeout)
    error = raised.value
    assert error.found == f"timeout={timeout!r}"
    assert error.wanted == "a number of seconds above 0, up to 1_000_000"
    assert "timeout=300" in error.fix


def test_tensors_that_cannot_be_handed_over(op):
    refused(op, (X.to_sparse(),), "argument 'x'", "strided tensors", "pass x as such a tensor")
    refused(op, (X.to("meta"),), "a tensor that is on meta", "with data", "pass x")
    with FakeTensorMode():
        fake = torch.empty(3)
    refused(op, (fake,), "a FakeTensor", "with data", "pass x")

    class Own(Tensor):
        pass

    refused(op, (X.as_subclass(Own),), "the subclass Own", "plain", "pass x")

    def mapped(x: Tensor) -> Tensor:
        refused(op, (x,), "inside a transform of torch.func", "plain", "pass x")
        return x

    torch.vmap(mapped)(X)

    refused(op, (X, lambda: 1), "argument 'n' of type function", "process", "without it")


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")])
def test_modes_around_the_call_change_nothing(define, assert_false, mode):
    contract = OpContract(unread={"y": lambda **_: True})
    op = define(SCHEMA, lambda x, n=2, y=None: x + n, contract, lambda x, n=2, y=None: x.clone())
    reads = define(
        SCHEMA.replace("op", "reads"), lambda x, n=2, y=None: x if y is None else x + y, contract
    )
    y = torch.ones(1)
    plain = check_contract(op, {"x": X, "y": y})
    with mode():
        assert check_contract(op, {"x": X, "y": y}) == plain
        assert_false(reads, {"x": X, "y": y}, "'y' filled with NaN: result", "^1 bit for bit")


def test_defaults_and_keyword_only_arguments(define):
    op = define(SCHEMA, lambda x, n=2, y=None: x + n + (0 if y is None else y), OpContract())
    assert check_contract(op, (X,)).claims[1].how.endswith("around x")
    assert check_contract(op, {"x": X, "y": X}).claims[1].how.endswith("around x, y")


def test_inputs_that_require_grad_and_parameters(op):
    for x in (X.clone().requires_grad_(), torch.nn.Parameter(X.clone())):
        assert check_contract(op, (x,)).holds == ("clean runs", "bounds (every op)")
        assert x.grad is None
        with torch.inference_mode():
            assert check_contract(op, (x,)).holds == ("clean runs", "bounds (every op)")


TENSORS = {
    "0-dim": torch.tensor(3.0),
    "zero-size": torch.empty(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "expanded": torch.tensor([2.0]).expand(5),
    "overlapping": torch.arange(6.0).as_strided((4, 3), (1, 1)),
    "a slice": torch.arange(9.0)[2:7:2],
    "float8_e4m3fn": BITS.view(torch.float8_e4m3fn),
    "float8_e5m2": BITS.view(torch.float8_e5m2),
    "float8_e8m0fnu": BITS.view(torch.float8_e8m0fnu),
    "float4": BITS.view(torch.float4_e2m1fn_x2),
    "bool": torch.tensor([True, False]),
    "int64": torch.arange(3),
    "uint16": torch.arange(3).to(torch.uint16),
    "complex64": torch.tensor([1 + 2j, 3j]),
    "complex128": torch.tensor([1 + 2j, 3j], dtype=torch.complex128),
    "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
    "float64": torch.rand(3, dtype=torch.float64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_any_tensor(define, name):
    def copy(x: Tensor, out: Tensor, unread: Tensor) -> Tensor:
        out.copy_(x)
        return x.clone()

    contract = OpContract(overwritten=("out",), unread={"unread": lambda **_: True})
    op = define("copy(Tensor x, Tensor(a!) out, Tensor? unread) -> Tensor", copy, contract)
    x = TENSORS[name]
    out = torch.empty_strided(x.shape, [1] * x.dim(), dtype=x.dtype) if x.dim() < 2 else x.clone()
    report = check_contract(op, (x, out.clone(), x))
    if x.numel():
        proved = ("clean runs", "unread['unread']", "overwritten 'out'", "bounds (every op)")
        assert report.holds == proved
    else:
        assert report.holds == ()
        assert set(report.not_exercised.values()) == {
            "the op gives no elements for these inputs to compare"
        }


def test_no_tensors_at_all(define):
    op = define("count(int n) -> int", lambda n: n + 1, OpContract())
    report = check_contract(op, (3,))
    assert report.holds == ("clean runs",)
    assert report.not_exercised == {"bounds (every op)": "no tensors"}
    op = define("nothing(Tensor x) -> ()", lambda x: None, OpContract())
    assert check_contract(op, (X,)).holds == ()


def test_several_results_and_lists(define):
    op = define("two(Tensor x) -> (Tensor, Tensor[])", lambda x: (x + 1, [x * 2]), OpContract())
    assert check_contract(op, (X,)).holds == ("clean runs", "bounds (every op)")

    def reads(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x + 1, [x, y.clone()]

    contract = OpContract(unread={"y": lambda **_: True})
    op = define("two_2(Tensor x, Tensor y) -> (Tensor, Tensor[])", reads, contract)
    with pytest.raises(ContractError, match=r"result\[1\] lies in the memory of argument 'x'"):
        check_contract(op, (X, X))

    def clones(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x + 1, [x.clone(), y.clone()]

    op = define("two_3(Tensor x, Tensor y) -> (Tensor, Tensor[])", clones, contract)
    with pytest.raises(ContractError, match=r"NaN: result\[1\]\[1\]\[0\] is nan, 6 of 6"):
        check_contract(op, (X, X.clone()))


def test_negative_zero_and_other_nans_differ_in_bits(define):
    contract = OpContract(unread={"y": lambda **_: True})

    def minus(x: Tensor, y: Tensor) -> Tensor:
        return x * (-1 if y.isnan().any() else 1)

    op = define("minus(Tensor x, Tensor y) -> Tensor", minus, contract)
    text = r"result\[0\] is -0, 2 of 2 elements differ: the op reads 'y'; wanted 0 bit for bit; fix"
    with pytest.raises(ContractError, match=text):
        check_contract(op, (torch.zeros(2), torch.ones(1)))

    def nan(x: Tensor, y: Tensor) -> Tensor:
        bits = 0x7FC00001 if y.isnan().any() else 0x7FC00000
        return torch.full((2,), bits, dtype=torch.int32).view(torch.float32)

    op = define("nan(Tensor x, Tensor y) -> Tensor", nan, contract)
    with pytest.raises(ContractError, match=r"is nan \(0x7fc00001\).* wanted nan \(0x7fc00000\)"):
        check_contract(op, (torch.zeros(2), torch.ones(1)))


def test_the_report_reads_like_this(define):
    contract = OpContract(
        gemm=Gemm(a="x", b="w"),
        align={"n": Align(4, pad={"w": 0})},
        prewait_reads=("w",),
        compile_units=lambda *_: (),
    )
    op = define("gemm(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w.t(), contract)
    report = check_contract(op, (torch.ones(2, 3), torch.ones(4, 3)))
    assert isinstance(report, ContractReport)
    assert str(report) == (
        "check_contract_tests.gemm.default: 3 hold for these inputs, 3 not exercised; 6 runs\n"
        "  holds          clean runs         deterministic, writes nothing undeclared,"
        " no undeclared alias\n"
        "  holds          align['n']         N 4 -> 8: same numbers within rounding;"
        " the pads are not read\n"
        "  holds          bounds (every op)  equal bits with poison around x, w\n"
        "  not exercised  prewait_reads w    needs CUDA\n"
        "  not exercised  gemm               nothing to run: says only which argument is which\n"
        "  not exercised  compile_units      for the warmup: no call rests on it"
    )
