"""A console whose stream may be closed on the other side."""

from __future__ import annotations

from rich.console import Console


class ProgressConsole(Console):
    """On stderr, for what nobody need read."""

    def on_broken_pipe(self) -> None:
        """No reason to end the process, which is what rich does."""
        self.quiet = True
