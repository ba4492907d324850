"""What ``warmup`` returns: what became of each unit, as data and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_ext.manifest import NotCovered
from compile_ext.ops.call_site import Call
from compile_ext.ops.device import Target
from compile_ext.planning import Missing, Plan
from compile_ext.warming.graphs import GraphResult
from compile_ext.warming.results import UnitResult

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from compile_ext.warming.certificate import Certificate

_STATUSES = ("compiled", "cached", "failed", "skipped")
_SLOWEST = 10  # rows of the table


@dataclass(frozen=True)
class WarmupReport:
    """Print it for a table.

    Args:
        results: of each unit, those of few tokens first.
        graphs: of each batch size, the largest first.
        plan: which site needs which units.
        target: the GPU that was compiled for; None where there is none.
        seconds: wall time of all.
        jobs: worker processes; 0 where nothing had to be compiled.
        bound_by: what bounded their number.
        folders: compiler -> where its kernels lie.
        loaded_on: the device on which each kernel was launched once, or None.
        warnings: what else the caller should know.
    """

    results: tuple[UnitResult, ...]
    graphs: tuple[GraphResult, ...]
    plan: Plan
    target: Target | None
    seconds: float
    jobs: int
    bound_by: str
    folders: Mapping[str, Path]
    loaded_on: str | None
    warnings: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many units there are of each status."""
        found = Counter(str(x.status) for x in self.results)
        return {status: found[status] for status in _STATUSES}

    @property
    def not_covered(self) -> tuple[NotCovered, ...]:
        """Calls whose kernels were not compiled, and why."""
        return self.plan.not_covered

    @property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """Key of a unit -> paths of the modules that need it."""
        found: dict[str, dict[str, None]] = {}
        for planned in self.plan.sites:
            for key in planned.keys:
                found.setdefault(key, {}).update(dict.fromkeys(planned.site.modules))
        return {key: tuple(paths) for key, paths in found.items()}

    @property
    def is_in_vain(self) -> bool:
        """Whether there are units, and not one of them is on disk now."""
        return bool(self.results) and not any(
            x.status in ("compiled", "cached") for x in self.results
        )

    def certificate(self) -> Certificate:
        """What is on disk now, to compare with later."""
        from compile_ext.warming.certificate import certificate_of

        return certificate_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts, lists, strings and numbers."""
        modules = self.modules
        units = [
            {
                "compiler": x.unit.compiler.name,
                "kernel": x.unit.kernel,
                "key": x.unit.key,
                "status": x.status,
                "seconds": x.seconds,
                "reason": x.reason,
                "modules": list(modules.get(x.unit.key, ())),
            }
            for x in self.results
        ]
        return {
            "target": asdict(self.target) if self.target else None,
            "counts": self.counts,
            "seconds": self.seconds,
            "jobs": self.jobs,
            "bound_by": self.bound_by,
            "folders": {name: str(folder) for name, folder in self.folders.items()},
            "loaded_on": self.loaded_on,
            "warnings": list(self.warnings),
            "units": units,
            "graphs": [asdict(x) for x in self.graphs],
            "not_covered": [asdict(x) for x in self.not_covered],
            "missing": [asdict(x) for x in self.plan.missing],
        }

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(self.__rich__())
        return capture.get().rstrip()

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(self.summary())]
        lines += [Text(f"warning: {x}") for x in self.warnings]
        parts: list[RenderableType] = [*lines]
        compiled = (x for x in self.results if x.status == "compiled")
        slowest = sorted(compiled, key=lambda x: -x.seconds)
        if slowest:
            title = f"slowest of {len(slowest)}" if len(slowest) > _SLOWEST else "slowest first"
            parts.append(self._table(title, slowest[:_SLOWEST]))
        left = [x for x in self.results if x.status in ("failed", "skipped")]
        if left:
            parts.append(self._table("not compiled", left))
        parts += [Text(_graph(x)) for x in self.graphs]
        parts += [Text(_not_covered(x)) for x in self.not_covered]
        parts += [Text(_missing(x)) for x in self.plan.missing]
        return Group(*parts)

    def summary(self) -> str:
        """How much of what, in a line or two."""
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items())
        gpu = (self.target.gpu or self.target.arch) if self.target else "no GPU"
        units = f"{_count(len(self.results), 'kernel')} of {_count(len(self.plan.sites), 'site')}"
        how = [f"{_count(self.jobs, 'worker')} ({self.bound_by})"] if self.jobs else []
        how += [f"loaded on {self.loaded_on}"] if self.loaded_on else []
        first = f"{units} for {gpu}: {counts}; {self.seconds:.1f} s"
        return "\n".join([first, ", ".join(how)] if how else [first])

    def _table(self, title: str, results: list[UnitResult]) -> Table:
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=box.ASCII2)
        for name in ("status", "compiler", "kernel", "first call", "s", "modules", "reason"):
            table.add_column(name, justify="right" if name == "s" else "left", overflow="fold")
        modules = self.modules
        for x in results:
            paths = modules.get(x.unit.key, ())
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            where = f"{paths[0]}{more}" if paths else ""
            texts = (x.status, x.unit.compiler.name, x.unit.kernel, _call(x.unit.calls[0]))
            table.add_row(*map(escape, (*texts, f"{x.seconds:.1f}", where, x.reason)))
        return table


def _call(call: Call) -> str:
    """``block_scaled_mm 576 x 7168, M = 2``: kernels of one name differ by what they are for."""
    site = call.site
    op = site.op.removeprefix("compile_ext::").rpartition(".")[0]
    size = f" {site.n} x {site.k}" if site.n is not None else ""
    return f"{op}{size}, M = {call.m}"


def _graph(x: GraphResult) -> str:
    made = f"failed: {x.reason}" if x.reason else f"{_count(x.graphs, 'graph')} compiled"
    return f"batch size {x.batch_size}: {made}, {x.seconds:.1f} s"


def _missing(x: Missing) -> str:
    ops = ", ".join(op.removeprefix("compile_ext::") for op in x.ops)
    return f"without {x.compiler}, so other kernels run {ops}: {x.reason}"


def _not_covered(x: NotCovered) -> str:
    return f"not covered: {x.op} ({', '.join(x.modules)}): {x.reason}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
