"""What ``explain`` returns: rows and fallbacks as data, and as a table."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from compile_ext.passes import Decision, Site
from compile_ext.passes.values import range_text

if TYPE_CHECKING:
    from rich.box import Box
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One candidate.

    Args:
        module: module path, from the identity of the weight: ``layers.3.mlp.down_proj``.
        op: what the graph calls there now.
        site: the GEMM, where it is one with a contract.
        decisions: what each pass did with it, in the order of the passes.
        constants: how each constant derived from the weight is kept: re-homed, or a copy and why.
    """

    module: str
    op: str
    site: Site | None
    decisions: tuple[Decision, ...]
    constants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fallback:
    """A frame, or the rest of one, that Dynamo left to Python.

    Args:
        where: ``file:line in function``.
        kind: ``graph break`` (the frame goes on in a further graph) or ``eager`` (it runs
            uncompiled).
        reason: what Dynamo says.
    """

    where: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What ``explain`` returns; print it for a table.

    Args:
        rows: all candidates, by module path.
        fallbacks: the frames of this model that Dynamo did not compile in one piece.
        graphs: how many live compiled graphs this model has.
        pass_seconds, compile_seconds: wall time of our passes, and of the compilations as a whole.
        disabled: passes that were switched off in one of the graphs.
        metrics_full: Dynamo keeps notes of its last compilations only, and has dropped some.
    """

    rows: tuple[Row, ...]
    fallbacks: tuple[Fallback, ...]
    graphs: int
    pass_seconds: float
    compile_seconds: float
    disabled: tuple[str, ...]
    metrics_full: bool

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts, lists, strings and numbers."""
        return asdict(self)

    def __str__(self) -> str:
        from rich import box  # 0.1 s that `import compile_ext` need not pay
        from rich.console import Console

        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(self._table(box.ASCII2))
            for f in self.fallbacks:
                text = f"{f.kind}: {f.where}: {f.reason}"
                console.print(text, highlight=False, markup=False, soft_wrap=True)
            if self.disabled:
                console.print(f"switched off: {', '.join(self.disabled)}")
            if self.metrics_full:
                console.print(
                    "Dynamo keeps its last compilations only: earlier frames may be missing here."
                )
        return capture.get().rstrip()

    def __rich__(self) -> Table:
        return self._table()

    def _table(self, frame: Box | None = None) -> Table:
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        counts = f"{_count(len(self.rows), 'candidate')} in {_count(self.graphs, 'graph')}"
        title = f"{counts} (* fired, - left alone)"
        table = Table(
            title=title, title_justify="left", show_lines=True, box=frame or box.HEAVY_HEAD
        )
        for name in ("module", "op", "M", "N", "K", "kernel"):
            table.add_column(name, justify="right" if name in "MNK" else "left", overflow="fold")
        table.add_column("decisions", ratio=1)
        for module, row in _grouped(self.rows):
            s = row.site
            lines = [f"{'*' if d.fired else '-'} {d.pass_name}: {d.detail}" for d in row.decisions]
            lines += [f"  weight: {kind}" for kind in row.constants]
            lines += [f"- kernel {reason}" for reason in (s.passed_over if s else ())]
            size = (range_text(*s.m), str(s.n), str(s.k), s.kernel) if s else ("", "", "", "")
            texts = module, row.op.removeprefix("compile_ext::"), *size, "\n".join(lines)
            table.add_row(*map(escape, texts))  # brackets are no styles
        return table


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _grouped(rows: tuple[Row, ...]) -> list[tuple[str, Row]]:
    """Rows that differ only in one layer number as one: ``layers.0-31.mlp.down_proj``."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        shape = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row.module)
        groups.setdefault((shape, row.op, row.site, row.decisions, row.constants), []).append(row)
    return [(_pattern([r.module for r in group]), group[0]) for group in groups.values()]


def _pattern(modules: list[str]) -> str:
    columns = zip(*(m.split(".") for m in modules), strict=True)
    return ".".join(_spans(list(dict.fromkeys(column))) for column in columns)


def _spans(values: list[str]) -> str:
    """``0-2,5`` for 0, 1, 2, 5."""
    if len(values) == 1:
        return values[0]
    numbers = sorted(map(int, values))
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
