"""The file of a measured table: written and read, and what is refused, with which words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from compile_ext.ops import device_tables, kernel_table
from compile_ext.ops.define import definitions
from compile_ext.ops.errors import TableError
from compile_ext.ops.kernel_table import Row, Table

ROWS = (
    Row("block_scaled_mm", 576, 7168, (1, 16), "triton_small_m"),
    Row("block_scaled_mm", 576, 7168, (17, 4096), "deep_gemm"),
    Row("scaled_mm", 64, 128, (5, 5), "triton"),
)
TABLE = Table(
    "sm_90", "NVIDIA H200", {"driver": "1.2", "torch": "2.11"}, "2026-11-30", "compile-ext", ROWS
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "table.json"
    kernel_table.write(path, TABLE)
    assert kernel_table.read(path) == TABLE
    shorter = Table(**{**TABLE.__dict__, "rows": ROWS[:1]})
    kernel_table.write(path, shorter)
    assert kernel_table.read(path) == shorter
    assert os.listdir(path.parent) == ["table.json"]  # no temporary file is left


def test_a_person_can_read_it(tmp_path: Path) -> None:
    kernel_table.write(tmp_path / "table.json", TABLE)
    lines = (tmp_path / "table.json").read_text().splitlines()
    assert lines[:3] == ["{", ' "arch": "sm_90",', ' "gpu": "NVIDIA H200",']
    row = '{"op": "scaled_mm", "n": 64, "k": 128, "m": [5, 5], "kernel": "triton"}'
    assert lines[-3:] == [f"  {row}", " ]", "}"]


def test_an_empty_table_is_one(tmp_path: Path) -> None:
    empty = Table(**{**TABLE.__dict__, "rows": ()})
    kernel_table.write(tmp_path / "table.json", empty)
    assert kernel_table.read(tmp_path / "table.json") == empty


def content(**changes: Any) -> dict[str, Any]:
    row = {"op": "scaled_mm", "n": 64, "k": 128, "m": [1, 5], "kernel": "triton", **changes}
    head = {"arch": "sm_90", "gpu": "G", "versions": {}, "date": "d", "command": "c"}
    return {**head, "rows": [row]}


BAD = {
    "a list": ([], "TypeError"),
    "no rows": ({k: v for k, v in content().items() if k != "rows"}, "KeyError: 'rows'"),
    "no gpu": ({k: v for k, v in content().items() if k != "gpu"}, "KeyError: 'gpu'"),
    "a number for the arch": ({**content(), "arch": 90}, "arch = 90 is no text"),
    "versions in a list": ({**content(), "versions": ["2.11"]}, "is no dict"),
    "a version as a number": ({**content(), "versions": {"torch": 2.11}}, "torch = 2.11"),
    "a range backwards": (content(m=[5, 1]), "in order"),
    "a range of one": (content(m=[5]), "ValueError"),
    "M from 0": (content(m=[0, 5]), "numbers from 1"),
    "N as text": (content(n="64"), "numbers from 1"),
    "K as a truth value": (content(k=True), "numbers from 1"),
    "a kernel as a number": (content(kernel=1), "op and kernel are text"),
    "two rows for an M": (
        {**content(), "rows": [*content()["rows"], *content(m=[5, 9])["rows"]]},
        "scaled_mm 64, 128: two rows for M = 5",
    ),
}


@pytest.mark.parametrize(("bad", "words"), BAD.values(), ids=BAD)
def test_no_table(tmp_path: Path, bad: Any, words: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(bad))
    with pytest.raises(TableError) as error:
        kernel_table.read(path)
    assert error.value.where == str(path)
    assert words in error.value.found
    assert "compile-ext tune" in error.value.fix


@pytest.mark.parametrize("text", [b"", b'{"arch": "sm_', b"\xff\xfe"], ids=str)
def test_no_json(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(text)
    with pytest.raises(TableError) as error:
        kernel_table.read(path)
    assert error.value.wanted == "a JSON file"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TableError) as error:
        kernel_table.write(tmp_path / "file" / "table.json", TABLE)
    assert "XDG_CACHE_HOME" in error.value.fix


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "table.json").mkdir()
    with pytest.raises(TableError):
        kernel_table.write(tmp_path / "table.json", TABLE)
    assert os.listdir(tmp_path) == ["table.json"]


def test_each_table_that_ships_is_one_and_names_what_there_is() -> None:
    kernels = {d.name: {k.name for k in d.kernels} for d in definitions()}
    for path in device_tables.SHIPPED.glob("*.json"):
        table = kernel_table.read(path)
        assert path.name == f"{table.arch}-{table.gpu.replace(' ', '_')}.json"
        assert table.rows
        for row in table.rows:
            assert row.kernel in kernels[row.op], row


def test_a_deep_nesting_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(TableError):
        kernel_table.read(path)


def test_a_write_that_fails_leaves_the_old_table_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    kernel_table.write(path, TABLE)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "chmod", full)
    with pytest.raises(TableError, match="No space left"):
        kernel_table.write(path, TABLE)
    assert [x.name for x in tmp_path.iterdir()] == ["table.json"]
    assert kernel_table.read(path) == TABLE
