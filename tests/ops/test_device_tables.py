"""Which tables hold for a device: the user's own, the shipped one of its GPU or architecture."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compile_ext.ops import device_tables, kernel_table
from compile_ext.ops.device_tables import Ranges
from compile_ext.ops.kernel_table import Row, Table

HERE = {"driver": "580.1", "torch": "2.13", "triton": "3.7", "deep_gemm": "", "compile_ext": "0.1"}


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An H200, and folders of the test's own."""
    here = device_tables.Machine("sm_90", "NVIDIA H200", HERE)
    monkeypatch.setattr(device_tables, "machine", lambda index: here)
    monkeypatch.setattr(device_tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    device_tables.ranges_of.cache_clear()
    yield
    device_tables.ranges_of.cache_clear()


def row(kernel: str, m: tuple[int, int] = (1, 16), n: int = 64) -> Row:
    return Row("scaled_mm", n, 128, m, kernel)


def ship(tmp_path: Path, name: str, *rows: Row, arch: str = "sm_90") -> None:
    table = Table(arch, name, {"torch": "2.11"}, "2026-11-30", "compile-ext tune", rows)
    kernel_table.write(tmp_path / "shipped" / f"{arch}-{name}.json", table)


def measured(*rows: Row, **changes: str) -> Path:
    here = device_tables.machine(0)
    path = device_tables.user_file(here)
    versions = {**here.versions, **changes}
    kernel_table.write(path, Table(here.arch, here.gpu, versions, "2026-12-01", "tune", rows))
    return path


def chosen(m: int, n: int = 64) -> str | None:
    ranges = device_tables.ranges_of(0).get(("scaled_mm", n, 128))
    return ranges.kernel(m) if ranges else None


def test_none(tmp_path: Path) -> None:
    assert device_tables.ranges_of(0) == {}
    assert device_tables.tables_of(0).problems == ()


def test_ranges() -> None:
    ranges = Ranges((1, 17, 100), (8, 99, 100), ("a", "b", "c"))
    found = [ranges.kernel(m) for m in (0, 1, 8, 9, 16, 17, 99, 100, 101)]
    assert found == [None, "a", "a", None, None, "b", "b", "c", None]


def test_the_shipped_one_of_the_gpu(tmp_path: Path) -> None:
    ship(tmp_path, "NVIDIA H100", row("aten"))
    ship(tmp_path, "NVIDIA H200", row("triton"))
    assert (chosen(1), chosen(16), chosen(17)) == ("triton", "triton", None)


def test_else_that_of_its_architecture(tmp_path: Path) -> None:
    ship(tmp_path, "NVIDIA H100", row("aten"))
    ship(tmp_path, "NVIDIA B200", row("triton"), arch="sm_100")
    assert chosen(1) == "aten"


def test_none_of_another_architecture(tmp_path: Path) -> None:
    ship(tmp_path, "NVIDIA B200", row("triton"), arch="sm_100")
    assert chosen(1) is None


def test_the_users_own_counts_shape_by_shape(tmp_path: Path) -> None:
    ship(tmp_path, "NVIDIA H200", row("aten", (1, 99)), row("aten", n=32))
    measured(row("triton"))
    assert (chosen(1), chosen(50), chosen(1, n=32)) == ("triton", None, "aten")


def test_one_of_other_versions_is_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = measured(row("triton"))
    newer = device_tables.Machine("sm_90", "NVIDIA H200", {**HERE, "torch": "2.14"})
    assert device_tables.user_file(newer) != path
    monkeypatch.setattr(device_tables, "machine", lambda index: newer)
    assert chosen(1) is None
    assert device_tables.tables_of(0).problems == ()


def test_a_foreign_one_under_this_name_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ship(tmp_path, "NVIDIA H200", row("aten"))
    path = measured(row("triton"), torch="2.11")
    with caplog.at_level(logging.WARNING):
        assert chosen(1) == "aten"
    [record] = caplog.records
    assert str(path) in record.getMessage()
    assert "not here: not used" in record.getMessage()


def test_a_broken_one_is_a_message_and_the_shipped_one_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ship(tmp_path, "NVIDIA H200", row("aten"))
    path = measured(row("triton"))
    path.write_text(path.read_text()[:-20])
    with caplog.at_level(logging.WARNING):
        assert [chosen(1), chosen(2)] == ["aten", "aten"]
    [record] = caplog.records  # once in a process
    assert str(path) in record.getMessage()
    assert "run compile-ext tune again" in record.getMessage()


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")  # a file where the folder should be
    assert chosen(1) is None
    [problem] = device_tables.tables_of(0).problems
    assert "Not a directory" in problem


def test_the_drivers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Thu Jan 1": "580.159.04",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release": "570.86",
    }
    for text, version in texts.items():
        monkeypatch.setattr(Path, "read_text", lambda self, text=text, **_: text)
        assert device_tables.driver() == version
    monkeypatch.setattr(Path, "read_text", lambda self, **_: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    assert device_tables.driver() == "CUDA 13000"
