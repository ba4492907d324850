"""A receipt says which files belong to a compile unit, and what is in them. It is written last: a
unit without one counts as not compiled, whatever lies in the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import compile_ext
from compile_ext import checked_json
from compile_ext.ops.compile_unit import CompileUnit

FORMAT = "compile_ext receipt"
VERSION = 1
_CHUNK = 2**20

# Path within the entry ("" where the entry is a file) -> SHA-256; "" of a file whose content
# depends on where it lies.
Files = Mapping[str, str]


@dataclass(frozen=True)
class Receipt:
    """What a compiled unit consists of.

    Args:
        compiler, kernel, key, made_from: of the unit.
        entries: name of each entry of the compiler's folder -> its files.
        package: the release of this package that wrote it.
    """

    compiler: str
    kernel: str
    key: str
    made_from: tuple[tuple[str, str], ...]
    entries: Mapping[str, Files]
    package: str

    @staticmethod
    def of(unit: CompileUnit, entries: Mapping[str, Files]) -> Receipt:
        return Receipt(
            unit.compiler.name,
            unit.kernel,
            unit.key,
            unit.made_from,
            entries,
            compile_ext.__version__,
        )

    def to_text(self) -> str:
        return checked_json.to_text(
            {
                "format": FORMAT,
                "version": VERSION,
                "package": self.package,
                "compiler": self.compiler,
                "kernel": self.kernel,
                "key": self.key,
                "made_from": [list(x) for x in self.made_from],
                "entries": {name: dict(files) for name, files in self.entries.items()},
            }
        )

    @staticmethod
    def from_text(text: str) -> Receipt:
        """Raises ValueError where it is no whole receipt of this version."""
        content = checked_json.from_text(text)
        if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"is no {FORMAT} of version {VERSION}")
        try:
            return _receipt(content)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"lacks a field: {type(error).__name__}: {error}") from error


def file_name(key: str) -> str:
    """Of a unit's receipt. The version is part of it: one that this release does not know stays."""
    return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.v{VERSION}.json"


def measure(entry: Path, movable: Collection[str] = ()) -> dict[str, str]:
    """The files of an entry and their checksums.

    Args:
        entry: a file or a folder.
        movable: files whose content depends on where they lie, which are not read.

    Raises:
        OSError: one cannot be read, or the entry is not there.
    """
    if not entry.is_dir():
        return {"": _sha256(entry)}
    files = sorted(x for x in entry.rglob("*") if x.is_file())
    names = [str(PurePosixPath(x.relative_to(entry))) for x in files]
    return {
        name: "" if name in movable else _sha256(file)
        for name, file in zip(names, files, strict=True)
    }


def damage(entry: Path, files: Files) -> str | None:
    """What is wrong with an entry, or None.

    Raises:
        OSError: a file that is there cannot be read.
    """
    if not files:
        return f"{entry.name} has no files"
    for name, wanted in files.items():
        file = entry / name if name else entry
        if file.resolve() != entry.parent.resolve() / file.relative_to(entry.parent):
            return f"{file.relative_to(entry.parent)} is reached by a link"
        if not file.is_file():
            return f"{file.relative_to(entry.parent)} is missing"
        if wanted and _sha256(file) != wanted:
            return f"{file.relative_to(entry.parent)} is not what was compiled"
    return None


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _is_inside(path: str) -> bool:
    """Whether it names something below the folder that it is joined to."""
    parts = PurePosixPath(path).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in path


def _receipt(content: dict[str, Any]) -> Receipt:
    entries = {name: dict(files) for name, files in content["entries"].items()}
    for name, files in entries.items():
        if not _is_inside(name) or name.startswith(".") or "/" in name:
            raise ValueError(f"names {name!r}, which is no entry of the folder")
        for file in files:
            if file and not _is_inside(file):
                raise ValueError(f"names {file!r}, which is no file of the entry {name}")
    texts = {x: content[x] for x in ("compiler", "kernel", "key", "package")}
    made_from = tuple((name, value) for name, value in content["made_from"])
    checksums = [x for files in entries.values() for x in files.values()]
    if not all(isinstance(x, str) for x in (*texts.values(), *checksums)):
        raise TypeError("a text is none")
    return Receipt(entries=entries, made_from=made_from, **texts)
