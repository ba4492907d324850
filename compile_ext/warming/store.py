"""A compiler's folder, and what this package knows of its content.

    folder/<entry>                          files and folders that the compiler looks for
    folder/.compile_ext/receipts/<key>      written last: which entries a unit has, with checksums
    folder/.compile_ext/stage/<process>/    what is being compiled, on the same disk
    folder/.compile_ext/locks/              flock: dies with its process

What is compiled lies in a stage until it is whole, and is renamed from there. So whatever a process
that is killed leaves is in its stage, or an entry without a receipt, which counts as not there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from compile_ext import checked_json
from compile_ext.ops.compile_unit import Compiler, CompileUnit
from compile_ext.warming import receipts
from compile_ext.warming.receipts import Receipt

if TYPE_CHECKING:
    from filelock import FileLock

PRIVATE = ".compile_ext"


@dataclass(frozen=True)
class Found:
    """What the folder has of a unit.

    Args:
        state: whole, missing, or damaged: a receipt is there, and does not fit.
        reason: what is wrong; "" where nothing is.
    """

    state: Literal["whole", "missing", "damaged"]
    reason: str = ""


class Store:
    """One folder of one compiler. Need not exist before ``prepare``."""

    def __init__(self, compiler: Compiler, folder: Path) -> None:
        self.compiler, self.folder = compiler, folder
        self._receipts = folder / PRIVATE / "receipts"
        self._locks = folder / PRIVATE / "locks"
        self._stages = folder / PRIVATE / "stage"

    def prepare(self) -> None:
        """Make the folders. Raises OSError where the folder takes no file, or what is this
        package's own leads out of it by a link: files are removed there."""
        for folder in (self._receipts, self._locks, self._stages):
            folder.mkdir(parents=True, exist_ok=True)
            if folder.resolve() != self.folder.resolve() / PRIVATE / folder.name:
                raise OSError(f"{folder} is reached by a link")
        with tempfile.TemporaryFile(dir=self._stages):
            pass

    def look(self, key: str) -> Found:
        """Whether what the unit needs is there, whole, and usable where it lies."""
        try:
            receipt = self._receipt(key)
        except (FileNotFoundError, NotADirectoryError):
            return Found("missing")
        except (OSError, ValueError) as error:
            return Found("damaged", f"its receipt {error}")
        for name, files in receipt.entries.items():
            wrong = self._wrong(name, files)
            if wrong:
                return Found("damaged", wrong)
        return Found("whole")

    def receipt_sum(self, key: str) -> str | None:
        """What identifies the content of a unit, at whatever place; None where it is not there."""
        try:
            receipt = self._receipt(key)
        except (OSError, ValueError):
            return None
        return checked_json.checksum({k: dict(v) for k, v in receipt.entries.items()})

    def _wrong(self, name: str, files: receipts.Files) -> str | None:
        entry = self.folder / name
        try:
            whole = receipts.damage(entry, files)
            if whole is None and any(not checksum for checksum in files.values()):
                self.compiler.arrived(entry)  # the folder may have come from another place
            return whole
        except Exception as error:  # of the compiler's own: what it cannot mend is damaged
            return f"{name}: {error}"

    def discard(self, key: str) -> None:
        """Remove what a damaged unit has left, so that nothing loads it. Raises OSError where it
        cannot be removed."""
        with self._installing():
            try:
                entries = self._receipt(key).entries
            except (OSError, ValueError):
                entries = {}  # nobody knows which entries were meant: they are replaced
            for name, files in entries.items():
                if self._wrong(name, files):
                    self._remove(self.folder / name)
            self._remove(self._path(key))

    def install(self, unit: CompileUnit, stage: Path, made_before: Collection[str]) -> list[str]:
        """Move the entries of a stage to where the compiler looks for them, and write the receipt.

        Args:
            made_before: names of entries that this process has made for other units: where the
                stage is empty, the unit needs nothing but some of them.

        Returns the names of the unit's entries.

        Raises:
            RuntimeError: there is none: the compiler has made nothing; or links.
            OSError: the disk is full, or the folder takes nothing.
        """
        names = sorted(x.name for x in stage.iterdir())
        with self._installing():
            files = {name: self._install(stage / name) for name in names}
            if not files:
                files = {name: self._measure(self.folder / name) for name in sorted(made_before)}
            if not files:
                raise RuntimeError("the compiler says nothing, and has made no file")
            text = Receipt.of(unit, files).to_text()
            written = stage / "receipt"
            written.write_text(text, encoding="utf-8")
            written.replace(self._path(unit.key))
        return list(files)

    def _install(self, made: Path) -> receipts.Files:
        """What is there already stays, if another unit's receipt says that it is whole: that
        receipt must go on holding."""
        entry = self.folder / made.name
        if os.path.lexists(entry):
            vouched = self._vouched(made.name)
            if vouched is not None:
                return vouched
            self._remove(entry)
        made.rename(entry)
        return self._measure(entry)

    def _measure(self, entry: Path) -> receipts.Files:
        made = [entry] if entry.is_symlink() else entry.rglob("*")
        links = [x.name for x in made if x.is_symlink()]
        if links:  # ``look`` would not follow them
            raise RuntimeError(f"the compiler has made links: {', '.join(links)}")
        return receipts.measure(entry, self.compiler.arrived(entry))

    def _vouched(self, name: str) -> receipts.Files | None:
        for path in self._receipts.glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                files = Receipt.from_text(path.read_text(encoding="utf-8")).entries.get(name)
                if files is not None and self._wrong(name, files) is None:
                    return files
        return None

    def _remove(self, entry: Path) -> None:
        """In one step for those who look for it. Another unit may have had it removed before."""
        with self.stage() as stage, contextlib.suppress(FileNotFoundError):
            entry.rename(stage / entry.name)

    def _receipt(self, key: str) -> Receipt:
        receipt = Receipt.from_text(self._path(key).read_text(encoding="utf-8"))
        if (receipt.key, receipt.compiler) != (key, self.compiler.name):
            raise ValueError("is that of another unit")
        return receipt

    def _path(self, key: str) -> Path:
        return self._receipts / receipts.file_name(key)

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """A folder for as long as the block lasts. Its lock says that its process lives."""
        owner = uuid.uuid4().hex  # never used twice: a lock that is free stays free
        lock = _file_lock(self._stages / f"{owner}.lock")
        with lock:
            folder = self._stages / owner
            try:
                folder.mkdir()
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # else the next warmup removes it
                Path(lock.lock_file).unlink(missing_ok=True)

    def remove_left_stages(self) -> None:
        """Remove what dead processes have left."""
        from filelock import Timeout

        for lock_file in self._stages.glob("*.lock"):
            lock = _file_lock(lock_file)
            with contextlib.suppress(Timeout), lock.acquire(timeout=0):
                shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
                lock_file.unlink(missing_ok=True)

    def key_lock(self, key: str) -> FileLock:
        """Who holds it compiles this unit."""
        return _file_lock(self._locks / f"{receipts.file_name(key)}.lock")

    def pool_lock(self) -> FileLock:
        """Who holds it runs the workers of this folder."""
        return _file_lock(self._locks / "pool.lock")

    def _installing(self) -> FileLock:
        """Held for moves within the folder: several units may share an entry."""
        return _file_lock(self._locks / "install.lock")


def _file_lock(path: Path) -> FileLock:
    from filelock import FileLock  # 20 ms that `import compile_ext` need not pay

    return FileLock(path)
