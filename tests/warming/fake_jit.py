"""A JIT compiler for tests: it counts what it compiles, sleeps, fails and dies on demand.

The unit's ``kernel`` says what it does, by words: ``sleep=0.1``, ``fail``, ``die`` (in the middle
of a write), ``die-once``, ``noise``, ``nothing``, ``hang``, ``hang-once``, ``drip`` (writes take
time), ``read-stdin``, ``chdir``, ``orphan`` (leaves a child that holds the pipes, and dies),
``link`` (to a folder outside), ``shared`` (a second entry, the same for all units), ``note-pid``
(in the file ``pid``), ``note-devices`` (that it sees, in the log), ``quota`` (the disk is full in
the middle of a write).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target

FOLDER = "FAKE_JIT_FOLDER"
PLACE = "place.txt"  # depends on where the entry lies
SIZE = 200_000  # bytes of a kernel


def kernel_bytes(key: str) -> bytes:
    return (key.encode() + b".") * (SIZE // (len(key) + 1))


class FakeJit:
    name = "fake"
    needs_device = False

    def why_not(self, target: Target) -> str | None:
        return None if target.capability == (9, 0) else "compiles for sm_90 alone"

    def folder(self) -> Path:
        return Path(os.environ[FOLDER]) / "cache"

    def compile(self, unit: CompileUnit, target: Target, stage: Path) -> None:
        note(unit.key)
        words = unit.kernel.split()
        for word in words:
            _obey(word, unit, stage)
        if "nothing" not in words:
            with _small_disk() if "quota" in words else contextlib.nullcontext():
                _write(stage / f"kernel.{unit.key}", unit.key, "drip" in words)
        if "shared" in words:
            _write(stage / "shared", f"{os.getpid()} {unit.key}", "drip" in words)

    def arrived(self, entry: Path) -> tuple[str, ...]:
        place = entry / PLACE
        text = place.read_text()
        if not text.startswith("/"):
            raise ValueError(f"{PLACE} is damaged")
        if text != str(entry):
            temporary = entry / f"{PLACE}.tmp"
            temporary.write_text(str(entry))
            temporary.replace(place)
        return (PLACE,)


class FakeJitOnGpu(FakeJit):
    name = "fake_on_gpu"
    needs_device = True


FAKE, ON_GPU = FakeJit(), FakeJitOnGpu()


def note(key: str) -> None:
    """One write with O_APPEND: lines of several processes do not mix."""
    log = os.open(Path(os.environ[FOLDER]) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{key}\n".encode())
    os.close(log)


def compiled() -> list[str]:
    """The key of each compilation that was begun."""
    log = Path(os.environ[FOLDER]) / "log"
    return log.read_text().split() if log.exists() else []


def unit(key: str, words: str = "", compiler: FakeJit = FAKE) -> CompileUnit:
    return CompileUnit(compiler, words or "plain", key, (), (("source", key),))


def _write(entry: Path, key: str, drip: bool) -> None:
    entry.mkdir()
    (entry / PLACE).write_text(str(entry))
    content = kernel_bytes(key)
    step = SIZE // 20 if drip else SIZE
    with (entry / "kernel.bin").open("wb") as file:
        for start in range(0, len(content), step):
            file.write(content[start : start + step])
            file.flush()
            time.sleep(0.001 if drip else 0.0)


@contextlib.contextmanager
def _small_disk() -> Iterator[None]:
    """Writes fail after half of a kernel, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _obey(word: str, unit: CompileUnit, stage: Path) -> None:
    word, _, value = word.partition("=")
    match word:
        case "sleep":
            time.sleep(float(value))
        case "hang" | "hang-once":
            if word == "hang" or compiled().count(unit.key) == 1:
                time.sleep(3600)
        case "note-devices":
            note(os.environ["CUDA_VISIBLE_DEVICES"] or "blind")
        case "note-pid":
            (Path(os.environ[FOLDER]) / f"pid.{os.getpid()}").write_text(str(os.getpid()))
            (Path(os.environ[FOLDER]) / f"pid.{os.getpid()}").replace(
                Path(os.environ[FOLDER]) / "pid"
            )
        case "read-stdin":
            assert os.read(0, 1) == b""
            assert sys.stdin.read() == ""
        case "chdir":
            os.chdir("/")
        case "orphan":
            if os.fork() == 0:
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL)
        case "link":
            (stage / "link").symlink_to(os.environ[FOLDER])
        case "fail":
            raise RuntimeError("the fake compiler refuses")
        case "noise":
            print("noise on stdout", flush=True)
            os.write(1, b"\x00\xff" * 5000)
            print("noise on stderr", file=sys.stderr)
        case "die" | "die-once":
            if word == "die" or compiled().count(unit.key) == 1:
                print("about to die", file=sys.stderr, flush=True)
                half = stage / "half"
                half.mkdir()
                (half / "kernel.bin").write_bytes(b"half of a ker")
                os.kill(os.getpid(), signal.SIGKILL)
