"""compile-ext tune: from measurements to the file, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from compile_ext.cli import app
from compile_ext.ops import device_tables, kernel_table
from compile_ext.ops.kernel_table import Row
from compile_ext.tune import command, operands

MACHINE = device_tables.Machine("sm_90", "NVIDIA H200", {"torch": "2.13"})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: Any, clock: Any) -> Path:
    """Everything as on an H200, but the operands are on the CPU and the clock is fixed. The user's
    table."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device_tables, "machine", lambda index: MACHINE)
    monkeypatch.setattr(command, "GraphClock", lambda: clock)
    make = operands.Fp8.weights
    monkeypatch.setattr(operands.Fp8, "weights", lambda self, n, k, _: make(self, n, k, "cpu"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return device_tables.user_file(MACHINE)


def tune(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", "--op", "scaled_mm", *arguments])


def test_writes_the_users_table(gpu: Path) -> None:
    done = tune("--shape", "32,64", "--tokens", "16,1,4,64")
    assert done.exit_code == 0, done.output
    table = kernel_table.read(gpu)
    assert (table.arch, table.gpu, table.versions) == ("sm_90", "NVIDIA H200", {"torch": "2.13"})
    assert table.rows == (
        Row("scaled_mm", 32, 64, (1, 15), "quick"),
        Row("scaled_mm", 32, 64, (16, 64), "steady"),
    )
    assert "5.00 *" in done.output  # 10 us for two layers
    assert "scaled_mm 32, 64, M = 4: kernel wrong: wrong: relative error 0.02" in done.output
    assert str(gpu) in done.output.replace("\n", "")
    assert device_tables.fits(table, MACHINE)


def test_keeps_the_rows_of_other_shapes_and_replaces_its_own(gpu: Path) -> None:
    for shape, tokens in (("32,64", "1,2"), ("16,64", "1"), ("32,64", "4")):
        assert tune("--shape", shape, "--tokens", tokens).exit_code == 0
    assert kernel_table.read(gpu).rows == (
        Row("scaled_mm", 16, 64, (1, 1), "quick"),
        Row("scaled_mm", 32, 64, (4, 4), "quick"),
    )


def test_keeps_the_commands_of_the_rows_that_it_keeps(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    old, new = (Row("scaled_mm", n, 64, (1, 1), "quick") for n in (16, 32))
    for rows, said, want in (
        ([old], "first", "first"),
        ([new], "second", "first; second"),
        ([new], "second", "first; second"),
        ([old, new], "third", "third"),
    ):
        table = command._merged(path, MACHINE, rows, said)
        assert table.command == want
        kernel_table.write(path, table)


def test_a_broken_table_and_one_of_another_machine_are_replaced(gpu: Path) -> None:
    assert tune("--shape", "16,64", "--tokens", "1").exit_code == 0
    old = kernel_table.read(gpu)
    kernel_table.write(gpu, type(old)(**{**old.__dict__, "versions": {"torch": "2.11"}}))
    assert tune("--shape", "32,64", "--tokens", "1").exit_code == 0
    assert [x.n for x in kernel_table.read(gpu).rows] == [32]
    gpu.write_text("{")
    assert tune("--shape", "48,64", "--tokens", "1").exit_code == 0
    assert [x.n for x in kernel_table.read(gpu).rows] == [48]


def test_ship_writes_the_file_that_is_named(gpu: Path, tmp_path: Path) -> None:
    path = tmp_path / "sm_90-NVIDIA_H200.json"
    assert tune("--shape", "32,64", "--tokens", "1", "--ship", str(path)).exit_code == 0
    assert kernel_table.read(path).rows == (Row("scaled_mm", 32, 64, (1, 1), "quick"),)
    assert not gpu.exists()


def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_measured(
    gpu: Path, tmp_path: Path, clock: Any
) -> None:
    (tmp_path / "cache").write_text("")  # a file where the folder should be
    done = tune("--shape", "32,64", "--tokens", "1")
    assert done.exit_code == 1
    assert "XDG_CACHE_HOME" in done.output
    assert clock.ran == []


def test_the_same_measurements_give_the_same_table(gpu: Path) -> None:
    texts = []
    for _ in range(2):
        assert tune("--shape", "32,64", "--tokens", "1,16").exit_code == 0
        texts.append(gpu.read_text())
    assert texts[0] == texts[1]


REFUSED = {
    "no device": ((), "no CUDA device"),
    "another op": (("--op", "fp8_bmm"), "block_scaled_mm, scaled_mm, router_gemm"),
    "a shape of one number": (("--shape", "64"), "wanted N,K"),
    "a shape in words": (("--shape", "big,64"), "wanted numbers from 1"),
    "no tokens": (("--tokens", "0"), "wanted numbers from 1"),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["tune", *arguments])
    assert done.exit_code in (1, 2)
    assert words in done.output
    assert "Traceback" not in done.output


@pytest.mark.gpu
def test_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real clock and the real kernels; the rows hold for the next look-up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for op, shape in (("block_scaled_mm", (256, 512)), ("scaled_mm", (48, 128))):
        path = command.tune(Console(), [op], [shape], [1, 16, 64], None, "test")
        rows = [x for x in kernel_table.read(path).rows if x.op == op]
        assert (rows[0].m[0], rows[-1].m[1]) == (1, 64)
        assert all((x.n, x.k) == shape for x in rows)
        device_tables.ranges_of.cache_clear()
        try:
            ranges = device_tables.ranges_of(torch.cuda.current_device())[(op, *shape)]
        finally:
            device_tables.ranges_of.cache_clear()
        assert ranges.kernel(64) == rows[-1].kernel
    assert len({x.op for x in kernel_table.read(path).rows}) == 2
