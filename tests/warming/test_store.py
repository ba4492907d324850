"""A cache folder: moved, damaged, shared with other releases, read-only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import fake_jit
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile_ext.warming import UnitResult
from compile_ext.warming.receipts import Receipt, file_name, measure
from compile_ext.warming.store import Store

Warm = Callable[..., dict[str, UnitResult]]
pytestmark = pytest.mark.usefixtures("forked")


def statuses(found: dict[str, UnitResult]) -> list[str]:
    return [x.status for x in found.values()]


def receipt(folder: Path, key: str) -> Path:
    return folder / "cache" / ".compile_ext" / "receipts" / file_name(key)


def test_a_folder_may_be_moved(warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch):
    warm("a", "b")
    moved = folder.with_name("moved")
    (folder).rename(moved)
    monkeypatch.setenv(fake_jit.FOLDER, str(moved))
    assert statuses(warm("a", "b")) == ["cached", "cached"]
    entry = moved / "cache" / "kernel.a"
    assert (entry / fake_jit.PLACE).read_text() == str(entry)  # mended, and not compared
    assert fake_jit.compiled() == ["a", "b"]


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("kernel.bin", _truncate, "kernel.a/kernel.bin is not what was compiled"),
        ("kernel.bin", _flip, "kernel.a/kernel.bin is not what was compiled"),
        ("kernel.bin", Path.unlink, "kernel.a/kernel.bin is missing"),
        (fake_jit.PLACE, Path.unlink, "kernel.a/place.txt is missing"),
        (fake_jit.PLACE, lambda path: path.write_text("?"), "kernel.a: place.txt is damaged"),
        ("receipt", _truncate, "its receipt"),
        ("receipt", _flip, "its receipt"),
    ],
)
def test_what_is_damaged_is_compiled_anew_and_named(
    warm: Warm, folder: Path, file: str, damage: Callable[[Path], object], said: str
):
    warm("a", "b")
    damage(receipt(folder, "a") if file == "receipt" else folder / "cache" / "kernel.a" / file)
    found = warm("a", "b")
    assert statuses(found) == ["compiled", "cached"]
    assert found["a"].reason.startswith(f"was damaged: {said}")
    content = (folder / "cache" / "kernel.a" / "kernel.bin").read_bytes()
    assert content == fake_jit.kernel_bytes("a")
    assert statuses(warm("a", "b")) == ["cached", "cached"]


def test_what_is_damaged_and_cannot_be_compiled_is_removed(warm: Warm, folder: Path):
    warm("a")
    _truncate(folder / "cache" / "kernel.a" / "kernel.bin")
    assert statuses(warm("a fail")) == ["failed"]
    assert not (folder / "cache" / "kernel.a").exists()


def test_an_entry_without_a_receipt_is_replaced(warm: Warm, folder: Path):
    entry = folder / "cache" / "kernel.a"
    entry.mkdir(parents=True)
    (entry / "kernel.bin").write_bytes(b"half")
    assert statuses(warm("a")) == ["compiled"]
    assert (entry / "kernel.bin").read_bytes() == fake_jit.kernel_bytes("a")


def test_units_share_an_entry(warm: Warm, folder: Path):
    """Compiled twice, its bytes differ; the first stays, since a receipt says that it is whole."""
    assert statuses(warm("a shared")) == ["compiled"]
    first = measure(folder / "cache" / "shared")
    assert statuses(warm("b shared")) == ["compiled"]
    assert measure(folder / "cache" / "shared") == first
    assert statuses(warm("a", "b")) == ["cached", "cached"]
    _truncate(folder / "cache" / "shared" / "kernel.bin")
    assert statuses(warm("a shared", "b shared")) == ["compiled", "compiled"]
    assert statuses(warm("a", "b")) == ["cached", "cached"]


def test_what_other_releases_have_written_stays(warm: Warm, folder: Path):
    warm("a")
    later = receipt(folder, "a").with_name(file_name("a").replace(".v1.", ".v2."))
    later.write_text("of a later release")
    stranger = folder / "cache" / "kernel.of-another-tool"
    stranger.mkdir()
    assert statuses(warm("a", "b")) == ["cached", "compiled"]
    assert later.read_text() == "of a later release"
    assert stranger.is_dir()


def test_a_folder_that_takes_no_file_is_used_as_it_is(warm: Warm, folder: Path):
    warm("a", "b")
    stage = folder / "cache" / ".compile_ext" / "stage"
    stage.rmdir()
    stage.write_text("root may write anywhere, but not below a file")
    _truncate(folder / "cache" / "kernel.b" / "kernel.bin")
    found = warm("a", "b", "c")
    assert statuses(found) == ["cached", "failed", "failed"]
    assert found["c"].reason == f"{folder / 'cache'} takes no file: File exists"
    assert found["b"].reason.endswith("kernel.b/kernel.bin is not what was compiled")


def test_a_receipt_of_another_unit_does_not_count(warm: Warm, folder: Path):
    warm("a", "b")
    receipt(folder, "a").write_text(receipt(folder, "b").read_text())
    found = Store(fake_jit.FAKE, folder / "cache").look("a")
    assert (found.state, found.reason) == ("damaged", "its receipt is that of another unit")


RECEIPT = Receipt.of(fake_jit.unit("a"), {"kernel.a": {"kernel.bin": "0" * 64, "place.txt": ""}})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.data())
def test_a_mutated_receipt_is_refused_or_says_the_same(data: st.DataObject):
    text = RECEIPT.to_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 20)))
    mutated = text[:start] + data.draw(st.text(max_size=10)) + text[end:]
    try:
        found = Receipt.from_text(mutated)
    except ValueError:
        return
    assert found == RECEIPT


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/passwd", ".compile_ext", "", "a/b", "a\0", ".."]
)
def test_a_receipt_names_entries_of_its_folder_alone(path: str):
    forged = Receipt.of(fake_jit.unit("a"), {path: {"": "0" * 64}}).to_text()
    with pytest.raises(ValueError, match="which is no entry of the folder"):
        Receipt.from_text(forged)
    assert json.loads(forged)["entries"] == {path: {"": "0" * 64}}


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "a\0", "."])
def test_a_receipt_names_files_of_its_entries_alone(path: str):
    forged = Receipt.of(fake_jit.unit("a"), {"kernel.a": {path: "0" * 64}}).to_text()
    with pytest.raises(ValueError, match="which is no file of the entry kernel"):
        Receipt.from_text(forged)


@pytest.mark.parametrize(
    "linked", ["kernel.a", f"kernel.a/{fake_jit.PLACE}", "kernel.a/kernel.bin"]
)
def test_what_is_reached_by_a_link_is_replaced_and_stays(warm: Warm, folder: Path, linked: str):
    warm("a")
    inside, outside = folder / "cache" / linked, folder / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    before = measure(outside)
    found = warm("a")
    assert found["a"].status == "compiled"
    assert found["a"].reason.startswith("was damaged: kernel.a/")
    assert found["a"].reason.endswith("is reached by a link")
    assert not inside.is_symlink()
    assert measure(outside) == before  # neither removed nor mended
    assert statuses(warm("a")) == ["cached"]


def test_a_link_in_the_place_of_an_entry_is_replaced(warm: Warm, folder: Path):
    (folder / "cache").mkdir()
    (folder / "cache" / "kernel.a").symlink_to(folder / "nowhere")
    assert statuses(warm("a")) == ["compiled"]
    assert statuses(warm("a")) == ["cached"]


def test_a_compiler_that_makes_a_link_has_failed(warm: Warm, folder: Path):
    assert warm("a link")["a"].reason == "RuntimeError: the compiler has made links: link"
    assert folder.is_dir()


@pytest.mark.parametrize("linked", [".compile_ext", ".compile_ext/stage", ".compile_ext/locks"])
def test_nothing_is_removed_where_a_link_leads(warm: Warm, folder: Path, linked: str):
    outside = folder / "outside"
    (outside / "poetry").mkdir(parents=True)
    (outside / "poetry.lock").write_text("of a project")
    link = folder / "cache" / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    found = warm("a")
    assert found["a"].status == "failed"
    assert found["a"].reason.endswith("is reached by a link")
    assert (outside / "poetry.lock").read_text() == "of a project"
    assert (outside / "poetry").is_dir()


def test_a_folder_may_itself_be_a_link(warm: Warm, folder: Path):
    (folder / "elsewhere").mkdir()
    (folder / "cache").symlink_to("elsewhere")
    assert statuses(warm("a")) == ["compiled"]
    assert statuses(warm("a")) == ["cached"]


def test_a_folder_in_the_place_of_a_receipt_is_removed(warm: Warm, folder: Path):
    warm("a")
    receipt(folder, "a").unlink()
    (receipt(folder, "a") / "x").mkdir(parents=True)
    found = warm("a")
    assert found["a"].status == "compiled"
    assert found["a"].reason.startswith("was damaged: its receipt [Errno 21] Is a directory")
    assert statuses(warm("a")) == ["cached"]


def test_what_cannot_be_removed_costs_its_unit(
    warm: Warm, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    warm("a")
    _truncate(folder / "cache" / "kernel.a" / "kernel.bin")

    def refuse(self: Store, key: str) -> None:  # root may remove anything
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Store, "discard", refuse)
    found = warm("a", "b")
    assert statuses(found) == ["failed", "compiled"]
    assert found["a"].reason == (
        "was damaged: kernel.a/kernel.bin is not what was compiled; it cannot be removed:"
        " [Errno 1] Operation not permitted"
    )
