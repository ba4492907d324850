"""What is compiled is kept on disk, found again, and never used half-written or damaged."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import tempfile
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from compile_ext.ops import compiled_cache
from compile_ext.ops.compiled_cache import Key, find, obtain

KERNEL = bytes(range(256)) * 100
FORK = multiprocessing.get_context("fork")


def key(parameters: str = "k=7168", compiler: str | None = "4.8.1+cu13") -> Key:
    return Key("gemv", (("arch", "sm_90a"), ("parameters", parameters)), compiler)


def no_compiler() -> bytes:
    raise AssertionError("compiled although the kernel is on disk")


def one_file(folder: Path) -> Path:
    (file,) = folder.glob("*.bin")
    return file


@pytest.fixture(autouse=True)
def unsaid() -> None:
    compiled_cache._cannot_keep.cache_clear()


def test_a_kernel_is_compiled_once_and_found_again(cache: Path) -> None:
    assert find(key()) is None
    assert obtain(key(), lambda: KERNEL) == (KERNEL, True)
    assert obtain(key(), no_compiler) == (KERNEL, False)
    assert find(key()) == KERNEL
    assert one_file(cache).name == f"gemv-{key().digest}-4.8.1+cu13.bin"


def test_another_key_is_another_kernel(cache: Path) -> None:
    obtain(key(), lambda: KERNEL)
    for other in (key("k=4096"), key(compiler="4.9.0+cu13"), key(compiler="4.8.1+cu12")):
        assert find(other) is None
        assert obtain(other, lambda: b"other") == (b"other", True)
    assert find(key()) == KERNEL
    assert find(key("k=4096")) == b"other"


def test_a_host_without_a_compiler_takes_what_another_has_compiled(cache: Path) -> None:
    assert find(key(compiler=None)) is None
    obtain(key(compiler="4.8.1"), lambda: b"old")
    assert find(key(compiler=None)) == b"old"
    obtain(key(compiler="4.9.0"), lambda: b"new")
    assert find(key(compiler=None)) == b"new"
    (cache / key(compiler="4.9.0").pattern()).write_bytes(b"damaged")
    assert find(key(compiler=None)) == b"old"


def test_the_folder_may_move(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obtain(key(), lambda: KERNEL)
    moved = cache.parent.rename(cache.parent.with_name("elsewhere"))
    monkeypatch.setenv("COMPILE_EXT_CACHE_DIR", str(moved))
    assert find(key()) == KERNEL


def test_what_is_damaged_is_compiled_anew(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    obtain(key(), lambda: KERNEL)
    file = one_file(cache)
    whole = file.read_bytes()
    damages = [whole[:cut] for cut in (0, 1, 63, 64, 65, 100, len(whole) - 1)]
    damages += [whole + b"\0", whole.replace(b"sm_90a", b"sm_80a")]
    for at in (0, 64, 70, len(whole) // 2, len(whole) - 1):
        damages.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for damaged in damages:
        file.write_bytes(damaged)
        caplog.clear()
        assert find(key()) is None
        assert f"{file}: damaged" in caplog.text
        assert obtain(key(), lambda: KERNEL) == (KERNEL, True)
        assert file.read_bytes() == whole


def test_a_file_under_the_name_of_another_is_not_used(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    obtain(key(), lambda: KERNEL)
    one_file(cache).rename(cache / key("k=4096").pattern())
    assert find(key("k=4096")) is None
    assert "another kernel than its name says" in caplog.text


def test_an_error_of_the_compiler_leaves_nothing(cache: Path) -> None:
    def fail() -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        obtain(key(), fail)
    assert [x.suffix for x in cache.iterdir()] == [".lock"]
    assert obtain(key(), lambda: KERNEL) == (KERNEL, True)


def test_a_folder_that_takes_no_file_costs_the_cache_alone(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_bytes(b"a file where the folder should be")
    for name in ("a", "b"):
        assert obtain(key(name), lambda: KERNEL) == (KERNEL, True)
    assert len(caplog.records) == 1  # said once
    assert str(cache) in caplog.text
    assert "COMPILE_EXT_CACHE_DIR" in caplog.text


def use_as_nobody(folder: Path) -> None:
    if os.geteuid() == 0:  # root may write anywhere
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    assert not os.access(folder, os.W_OK)
    assert obtain(key(), no_compiler) == (KERNEL, False)
    assert obtain(key("k=4096"), lambda: KERNEL) == (KERNEL, True)


def test_a_read_only_folder_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's folders are closed to other users
        os.chmod(place, 0o755)
        monkeypatch.setenv("COMPILE_EXT_CACHE_DIR", place)
        obtain(key(), lambda: KERNEL)
        folder = compiled_cache.folder()
        folder.chmod(0o555)
        process = FORK.Process(target=use_as_nobody, args=(folder,))
        process.start()
        process.join()
        folder.chmod(0o755)
        assert process.exitcode == 0
        assert find(key("k=4096")) is None


def test_a_full_disk_leaves_no_part_of_a_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert obtain(key(), lambda: KERNEL) == (KERNEL, True)
    assert "No space left on device" in caplog.text
    assert [x.suffix for x in cache.iterdir()] == [".lock"]
    assert obtain(key(), lambda: KERNEL) == (KERNEL, True)
    assert obtain(key(), no_compiler) == (KERNEL, False)


def test_another_user_may_read_it(cache: Path) -> None:
    before = os.umask(0o022)
    obtain(key(), lambda: KERNEL)
    os.umask(before)
    assert one_file(cache).stat().st_mode & 0o777 == 0o644


def compile_slowly(log: Path) -> None:
    """What several processes run at once."""

    def compile() -> bytes:
        with log.open("a") as file:
            file.write("compiled\n")
        time.sleep(0.2)
        return KERNEL

    assert obtain(key(), compile)[0] == KERNEL


def test_processes_that_start_together_compile_once(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [FORK.Process(target=compile_slowly, args=(log,)) for _ in range(4)]
    for x in processes:
        x.start()
    for x in processes:
        x.join()
    assert [x.exitcode for x in processes] == [0, 0, 0, 0]
    assert log.read_text() == "compiled\n"


def hold_for_ever(started: Path) -> None:
    def compile() -> bytes:
        started.touch()
        time.sleep(1000)
        return b""

    obtain(key(), compile)


def holder(started: Path) -> ForkProcess:
    process = FORK.Process(target=hold_for_ever, args=(started,))
    process.start()
    while not started.exists():
        time.sleep(0.005)
    return process


def test_the_lock_of_a_killed_process_holds_nobody(cache: Path, tmp_path: Path) -> None:
    process = holder(tmp_path / "started")
    process.kill()
    process.join()
    assert [x.suffix for x in cache.iterdir()] == [".lock"]  # it is still there
    assert obtain(key(), lambda: KERNEL) == (KERNEL, True)
    assert find(key()) == KERNEL


def test_a_compiler_that_hangs_holds_the_others_for_a_while(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(compiled_cache, "LOCK_SECONDS", 0.1)
    process = holder(tmp_path / "started")
    try:
        assert obtain(key(), lambda: KERNEL) == (KERNEL, True)
    finally:
        process.kill()
        process.join()
    assert "compiled here as well" in caplog.text
    assert find(key()) is None  # the lock's holder writes, nobody else


def write_for_ever(started: Path) -> None:
    for i in range(10**6):
        started.touch()
        obtain(key(f"k={i % 5}"), lambda i=i: KERNEL * (i % 5 + 1))
        compiled_cache.folder().joinpath(key(f"k={i % 5}").pattern()).unlink()


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_files(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    whole = 0
    for _ in range(200):
        started = tmp_path / "started"
        started.unlink(missing_ok=True)
        process = FORK.Process(target=write_for_ever, args=(started,))
        process.start()
        while not started.exists():
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.01))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for i in range(5):
            found = find(key(f"k={i}"))
            assert found in (None, KERNEL * (i + 1))
            whole += found is not None
    assert whole > 10  # the kills do come in the middle
    assert caplog.text == ""  # nothing was damaged either
    for i in range(5):
        (cache / key(f"k={i}").pattern()).unlink(missing_ok=True)
        assert obtain(key(f"k={i}"), lambda: KERNEL) == (KERNEL, True)
    assert list(cache.glob("*.tmp")) == []  # what the killed ones left
