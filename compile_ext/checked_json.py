"""JSON files that say of themselves whether they are whole: ``sha256`` is that of all the rest."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_SUM = "sha256"


def to_text(content: dict[str, Any]) -> str:
    """``content`` with its checksum, for a person to read."""
    return json.dumps({**content, _SUM: checksum(content)}, indent=1, sort_keys=True) + "\n"


def from_text(text: str) -> dict[str, Any]:
    """What ``to_text`` was given.

    Raises:
        ValueError: it is no JSON object, or another one than was written.
    """
    try:
        content = json.loads(text)
    except RecursionError as error:  # of a deep nesting
        raise ValueError("is no JSON object of ours: nested too deep") from error
    if not isinstance(content, dict):
        raise ValueError("is no JSON object")
    found = content.pop(_SUM, None)
    if found != checksum(content):
        raise ValueError("is damaged or was edited: its checksum does not fit")
    return content


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of the content, however it is laid out."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
