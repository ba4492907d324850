"""Write a file in one step: whoever reads it meanwhile sees the old one or the new one, and one
that cannot be written to the end leaves the old one as it was."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Make the folder where there is none, and put ``text`` in the place of the file.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
