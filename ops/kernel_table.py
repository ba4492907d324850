"""The file format of a measured table: which kernel is tried first, by op, N, K and a range of M.

One JSON file holds what was measured on one GPU. ``device_tables.py`` says which files hold for a
device; ``compile-ext tune`` writes them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compile_ext.ops.errors import TableError
from compile_ext.ops.replace_file import replace_text

_FIX = "run compile-ext tune again, or delete the file"


@dataclass(frozen=True, order=True)
class Row:
    """One range of M of one shape.

    Args:
        op: without the namespace, ``block_scaled_mm``.
        n, k: output and input features.
        m: the first and the last number of tokens, both inclusive.
        kernel: the kernel that is tried first.
    """

    op: str
    n: int
    k: int
    m: tuple[int, int]
    kernel: str


@dataclass(frozen=True)
class Table:
    """All rows of one file, and what they were measured on.

    Args:
        arch: of the GPU, ``sm_90``.
        gpu: its name, as the driver gives it.
        versions: of what a measurement depends on, by name: driver, torch, ...
        date: of the last measurement, ISO 8601.
        command: that made it.
        rows: sorted; the ranges of one op, n and k are apart.
    """

    arch: str
    gpu: str
    versions: Mapping[str, str]
    date: str
    command: str
    rows: tuple[Row, ...]


def read(path: Path) -> Table:
    """The table in a file.

    Raises:
        TableError: it cannot be read, is no JSON, or no table.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last of a deep nesting
        raise TableError(str(path), f"{error}", "a JSON file", _FIX) from error
    try:
        return _table(content)
    except (KeyError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise TableError(str(path), found, "a kernel table", _FIX) from error


def require_writable(path: Path) -> None:
    """Make the folder.

    Raises:
        TableError: it takes no file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def write(path: Path, table: Table) -> None:
    """Replace the file in one step: whoever reads it meanwhile sees the old table or the new one.

    Raises:
        TableError: the folder or the file cannot be written.
    """
    head = {k: v for k, v in asdict(table).items() if k != "rows"}
    # One line a row: a person reads this, and a difference is a line.
    rows = ",\n".join(f"  {json.dumps(asdict(row))}" for row in sorted(table.rows))
    text = json.dumps(head, indent=1).removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'
    try:
        replace_text(path, text)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> TableError:
    fix = "make it writable, or set XDG_CACHE_HOME to another folder"
    return TableError(str(path), f"{error}", "a file that can be written", fix)


def _table(content: Any) -> Table:
    rows = tuple(sorted(_row(x) for x in content["rows"]))
    _check_apart(rows)
    versions = content["versions"]
    if not isinstance(versions, dict):
        raise TypeError(f"versions = {versions!r} is no dict")
    texts = {name: content[name] for name in ("arch", "gpu", "date", "command")}
    for name, text in {**texts, **versions}.items():
        if not isinstance(text, str):
            raise TypeError(f"{name} = {text!r} is no text")
    return Table(rows=rows, versions=versions, **texts)


def _row(content: Any) -> Row:
    first, last = content["m"]
    row = Row(content["op"], content["n"], content["k"], (first, last), content["kernel"])
    sizes = row.n, row.k, first, last
    if not all(type(x) is int and x >= 1 for x in sizes) or first > last:
        raise ValueError(f"{content}: n, k and m [first, last] are numbers from 1, in order")
    if not all(isinstance(x, str) for x in (row.op, row.kernel)):
        raise TypeError(f"{content}: op and kernel are text")
    return row


def _check_apart(rows: Iterable[Row]) -> None:
    last: dict[tuple[str, int, int], int] = {}
    for row in rows:
        if row.m[0] <= last.get((row.op, row.n, row.k), 0):
            raise ValueError(f"{row.op} {row.n}, {row.k}: two rows for M = {row.m[0]}")
        last[row.op, row.n, row.k] = row.m[1]
