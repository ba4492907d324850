"""From times to rows: noise, and the ends of a range."""

from __future__ import annotations

import pytest

from compile_ext.ops.kernel_table import Row
from compile_ext.tune.choose import Timing, fastest, rows_of

CASES = {  # (median, quartiles) of the first and of the second kernel of a tuple, the choice
    "clearly faster": ((10.0, 9.9, 10.1), (9.0, 8.9, 9.1), "second"),
    "slower": ((10.0, 9.9, 10.1), (11.0, 10.9, 11.1), "first"),
    "the same": ((10.0, 9.9, 10.1), (10.0, 9.9, 10.1), "first"),
    "faster by less than 1 %": ((10.0, 10.0, 10.0), (9.91, 9.91, 9.91), "first"),
    "faster by more than 1 %": ((10.0, 10.0, 10.0), (9.89, 9.89, 9.89), "second"),
    "within the quartiles": ((10.0, 9.0, 11.0), (9.5, 8.5, 9.1), "first"),
    "just beyond the quartiles": ((10.0, 9.2, 11.0), (9.0, 8.5, 9.1), "second"),
}


@pytest.mark.parametrize(("first", "second", "wanted"), CASES.values(), ids=CASES)
def test_a_later_kernel_has_to_be_faster_beyond_noise(
    first: tuple[float, float, float], second: tuple[float, float, float], wanted: str
) -> None:
    assert fastest({"first": Timing(*first), "second": Timing(*second)}) == wanted


def test_each_is_compared_with_the_best_so_far() -> None:
    times = {name: Timing(us, us, us) for name, us in {"a": 10.0, "b": 8.0, "c": 7.95}.items()}
    assert fastest(times) == "b"


def test_of_no_kernel_none() -> None:
    assert fastest({}) is None


def rows(by_m: dict[int, str | None]) -> list[tuple[tuple[int, int], str]]:
    made = list(rows_of("op", 64, 128, by_m))
    assert all((x.op, x.n, x.k) == ("op", 64, 128) for x in made)
    return [(x.m, x.kernel) for x in made]


def test_neighbours_with_one_kernel_are_one_row() -> None:
    assert rows({1: "a", 2: "a", 8: "a"}) == [((1, 8), "a")]


def test_a_row_ends_before_the_next_measured_m() -> None:
    assert rows({1: "a", 4: "a", 16: "b", 64: "b", 256: "a"}) == [
        ((1, 15), "a"),
        ((16, 255), "b"),
        ((256, 256), "a"),
    ]


def test_the_order_of_measuring_makes_no_difference() -> None:
    assert rows({16: "b", 1: "a"}) == rows({1: "a", 16: "b"}) == [((1, 15), "a"), ((16, 16), "b")]


def test_no_row_where_no_kernel_runs() -> None:
    found = rows({1: None, 2: "a", 4: None, 8: None, 16: "a", 32: "a"})
    assert found == [((2, 3), "a"), ((16, 32), "a")]
    assert rows({1: None}) == []


def test_rows_can_be_read_back() -> None:
    [one] = rows_of("op", 64, 128, {1: "a"})
    assert one == Row("op", 64, 128, (1, 1), "a")
