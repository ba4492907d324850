"""One folder for all that is compiled, so that it can be packed, moved and used elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from compile_ext.ops import cache_folder, triton_support
from compile_ext.ops.errors import CacheFolderError

# Environment variable -> its folder. This package's own holds ``kernels`` (CuTe DSL) and
# ``kernel_tables`` (which kernel is tried first).
_FOLDERS = {
    triton_support.CACHE_VARIABLE: "triton",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    cache_folder.VARIABLE: "compile_ext",
}
_TABLES = "kernel_tables"


def use_cache_dir(folder: Path) -> None:
    """From now on this process, and those that it starts, keep what they compile below ``folder``.

    Tables that ``compile-ext tune`` has measured are copied: they choose kernels there too.

    Raises:
        CacheFolderError: DeepGEMM, which reads the name of its folder once, has read another one;
            or the folder cannot be made. Nothing has changed then.
    """
    folder = _absolute(folder)
    given = os.environ.get("DG_JIT_CACHE_DIR", "")
    wanted = str(folder / _FOLDERS["DG_JIT_CACHE_DIR"])
    if "deep_gemm" in sys.modules and given != wanted:
        raise CacheFolderError(
            "warmup(cache_dir=)",
            f"DeepGEMM imported with {given or 'its own folder'}",
            f"a DeepGEMM that keeps its kernels in {wanted}",
            f"start the process with DG_JIT_CACHE_DIR={wanted}, or call warmup before DeepGEMM is"
            " imported",
        )
    try:
        str(folder).encode()  # Triton reads its name as UTF-8
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: of the name
        fix = "name a folder that is there or can be made"
        raise CacheFolderError("warmup(cache_dir=)", str(error), "a folder", fix) from error
    measured = cache_folder.cache_folder() / _TABLES
    look_in(folder)
    _copy_new(measured, cache_folder.cache_folder() / _TABLES)


def look_in(folder: Path) -> None:
    """From now on this process, and those that it starts, look below ``folder``.

    Raises:
        CacheFolderError: it is relative, and the working directory is gone.
    """
    folder = _absolute(folder)
    os.environ.update({variable: str(folder / name) for variable, name in _FOLDERS.items()})


def _copy_new(source: Path, target: Path) -> None:
    """Tables that are in ``target`` already are newer, or the same."""
    missing = [x for x in source.glob("*.json") if not (target / x.name).exists()]
    try:
        for table in missing:
            target.mkdir(parents=True, exist_ok=True)
            temporary = target / f".{table.name}.{os.getpid()}.tmp"
            shutil.copyfile(table, temporary)
            temporary.replace(target / table.name)
    except OSError as error:
        fix = "name a folder that takes files, or copy the tables there yourself"
        wanted = f"a folder that takes the measured tables of {source}"
        raise CacheFolderError("warmup(cache_dir=)", str(error), wanted, fix) from error


def _absolute(folder: Path) -> Path:
    try:
        return folder.absolute()
    except OSError as error:
        found = f"{folder}, and a working directory that is gone ({error.strerror})"
        fix = "change to a folder that is there, or name an absolute one"
        raise CacheFolderError("cache_dir", found, "a folder", fix) from error
