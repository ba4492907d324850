"""Which release of a package is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release_of(package: str) -> str:
    """As its metadata says, without importing it; "" where there are none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
