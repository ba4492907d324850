"""Where the package keeps what it has measured and compiled."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "COMPILE_EXT_CACHE_DIR"


def cache_folder() -> Path:
    """What ``COMPILE_EXT_CACHE_DIR`` names, or the user's cache folder. Need not exist."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    from platformdirs import user_cache_path  # not at import time: only where a GPU is

    return user_cache_path("compile_ext")
