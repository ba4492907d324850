"""Reads and writes outside of a tensor; layouts that a contract's ``memory`` allows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compile_ext.ops import Gemm, OpContract
from compile_ext.ops.contract import Memory
from compile_ext.testing import check_contract
from compile_ext.testing.claims.poison import poisons
from compile_ext.testing.memory import copied, elements, fill, guarded, poisoned_copy

ADD = "add(Tensor x, Tensor y) -> Tensor"


def rows(count: int) -> Tensor:
    """``[count, 3]`` at the end of a larger allocation with gaps of one element."""
    memory = torch.arange(4.0 * count + 8)
    return memory[6 : 6 + 4 * count].view(count, 4)[:, :3]


def test_a_read_over_the_end(define, assert_false):
    def reads_on(x: Tensor, y: Tensor) -> Tensor:
        return x + y.as_strided((4, 3), y.stride()).sum(0)  # y has 2 rows

    op = define(ADD, reads_on, OpContract())
    found = (
        r"^bounds \(every op\): poison around argument 'y': result\[0, 0\] is nan,"
        r" 6 of 6 elements differ: the op reads what lies outside of the tensor$"
    )
    wanted = r"^\d+ bit for bit$"
    assert_false(op, (rows(2), rows(4)[:2]), found, wanted, "inside of the tensor")


def test_a_read_before_the_start_and_one_between_rows(define, assert_false):
    def reads_back(x: Tensor, y: Tensor) -> Tensor:
        return x + y.as_strided((1,), (1,), y.storage_offset() - 1)

    op = define(ADD, reads_back, OpContract())
    assert_false(op, (rows(2), rows(2)), "around argument 'y': result", "bit for bit")

    def reads_rows(x: Tensor, y: Tensor) -> Tensor:
        return x + y.as_strided((2, 4), (4, 1)).sum()

    op = define(ADD.replace("add", "add_2"), reads_rows, OpContract())
    assert_false(op, (rows(2), rows(2)), "around argument 'y': result", "bit for bit")
    # Without gaps, there is nothing in between to read.
    op = define(ADD.replace("add", "add_3"), lambda x, y: x + y, OpContract())
    assert check_contract(op, (rows(2), rows(2))).claims[1].how == (
        "equal bits with poison around x, y"
    )


@pytest.mark.parametrize(
    ("at", "where"),
    [
        (3, "between its elements, 3 elements behind the first one"),
        (7, "1 element behind its last one"),
        (-2, "2 elements before its first one"),
    ],
)
def test_a_write_outside_of_a_buffer(define, assert_false, at, where):
    def writes_on(x: Tensor, out: Tensor) -> None:
        out.as_strided((1,), (1,), out.storage_offset() + at).fill_(-1)

    op = define("into(Tensor x, Tensor(a!) out) -> ()", writes_on, OpContract())
    found = rf"^clean run: memory outside of argument 'out' was written, {where}$"
    assert_false(op, (rows(2), rows(2)), found, "no such write", "inside of the tensor")


def test_a_tensor_in_a_list_is_named_by_its_place(define, assert_false):
    def reads_on(xs: list[Tensor]) -> Tensor:
        return xs[0] + xs[1].as_strided((3, 3), (4, 1)).sum()

    op = define("add(Tensor[] xs) -> Tensor", reads_on, OpContract())
    assert_false(op, ([rows(2), rows(3)[:2]],), r"around argument 'xs'\[1\]: result", "bit for bit")
    op = define("add_2(Tensor[] xs) -> Tensor", lambda xs: xs[0] + xs[1], OpContract())
    assert "bounds (every op)" in check_contract(op, ([rows(2), rows(2)],)).holds


GEMM = "gemm(Tensor x, Tensor w) -> Tensor"
CLAIM = OpContract(gemm=Gemm(a="x", b="w"), memory={"w": Memory(address=16, stride=4)})


def test_memory_is_proved_with_rows_further_apart(define):
    op = define(GEMM, lambda x, w: x @ w.t(), CLAIM)
    for k, strides in ((3, "(4, 1)"), (4, "(8, 1)")):
        report = check_contract(op, (torch.randn(2, k), torch.randn(5, k)))
        assert report.claims[2].name == "memory['w']"
        assert report.claims[2].how == (
            f"same numbers with strides {strides}, and nothing between them is read"
        )
    column_major = torch.randn(4, 5).t()
    how = check_contract(op, (torch.randn(2, 4), column_major)).claims[2].how
    assert "with strides (1, 8)" in how


def test_an_op_that_takes_other_strides_for_granted(define, assert_false):
    def dense(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.as_strided(w.shape, (w.shape[1], 1)).t()

    op = define(GEMM, dense, CLAIM)
    found = r"memory\['w'\]: argument 'w' with strides \(8, 1\): result\[\d, \d\] is"
    inputs = torch.randn(2, 4), torch.randn(5, 4)
    assert_false(op, inputs, found, "within rounding", "for such strides of 'w'")


def test_an_op_that_needs_zeros_between_the_rows(define, assert_false):
    def whole_rows(x: Tensor, w: Tensor) -> Tensor:
        wide = w.as_strided((w.shape[0], w.stride(0)), (w.stride(0), 1))
        return x @ w.t() + 0 * wide.sum()

    op = define(GEMM, whole_rows, CLAIM)
    found = r"argument 'w' with strides \(8, 1\), poison between its rows: result\[0, 0\] is nan"
    assert_false(op, (torch.randn(2, 4), torch.randn(5, 4)), found, "bit for bit")


def test_copies_keep_strides_offsets_overlap_and_shared_memory():
    base = torch.arange(20, dtype=torch.int16)
    tree = {"a": base[3:].as_strided((3, 3), (2, 1)), "b": [base[4:6], 7], "c": base[2:3].expand(4)}
    copy = copied(tree)
    assert copy["a"].stride() == (2, 1)
    assert copy["a"].storage_offset() == 3
    assert copy["c"].stride() == (0,)
    assert copy["b"][1] == 7
    assert torch.equal(copy["a"], tree["a"])
    copy["b"][0].fill_(-1)
    assert copy["a"][0, 1] == -1  # one storage, as before
    assert base.min() == 0


def test_fill_and_guard_touch_the_elements_alone():
    x = torch.zeros(12, dtype=torch.bfloat16)[1:].as_strided((2, 2), (4, 1))
    fill(x, b"\x80\x3f")  # 1.0
    assert x.tolist() == [[1, 1], [1, 1]]
    assert torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).sum() == 4
    assert elements(x).tolist() == [1, 2, 5, 6]
    around = guarded(x)
    assert torch.equal(around, x)
    assert around.stride() == x.stride()
    assert around.data_ptr() % 64 == x.data_ptr() % 64
    everything = torch.empty(0, dtype=x.dtype).set_(around.untyped_storage())
    assert int(everything.isnan().sum()) == everything.numel() - 4
    empty = guarded(torch.empty(0, 3))
    assert empty.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_the_poison_of_formats_whose_only_nan_is_0x80(dtype):
    x = torch.ones(6).to(dtype)
    assert bool(poisoned_copy(x).float().isnan().all())
    memory = torch.empty(0, dtype=dtype).set_(guarded(x).untyped_storage())
    assert int(memory.float().isnan().sum()) == memory.numel() - x.numel()
    names = ["NaN", "the largest", "the smallest", "zero"]  # Inf and poison are NaN
    assert list(poisons(dtype)) == names
