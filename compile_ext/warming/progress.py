"""What a warmup says while it runs: a bar on a terminal, else a line for each unit, on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from compile_ext.warming.results import UnitResult

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Progress:
    """Shown inside a ``with`` block; silent where ``show`` is false."""

    def __init__(self, show: bool) -> None:
        from compile_ext.warming.console import ProgressConsole

        self._console = ProgressConsole(stderr=True, quiet=not show, soft_wrap=True)
        self._bar: Bar | None = None
        self._total = self._done = 0

    def __enter__(self) -> Progress:
        from rich import progress

        if self._console.is_terminal and not self._console.quiet:
            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
            )
            self._bar = progress.Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._bar.add_task("compiling kernels", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        try:
            self._console.print(text, markup=False, highlight=False)
        except OSError:  # a pipe or a disk that takes no more: the kernels are what is wanted
            self._console.quiet = True

    def begin(self, total: int) -> None:
        """``total`` further units are not on disk."""
        self._total = self._done + total
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], total=self._total)

    def done(self, result: UnitResult) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
            if result.status != "failed":
                return
        what = f"{result.status} {result.unit.compiler.name} {result.unit.kernel}"
        reason = f": {result.reason}" if result.reason else ""
        self.say(f"[{self._done}/{self._total}] {what} ({result.seconds:.1f} s){reason}")
