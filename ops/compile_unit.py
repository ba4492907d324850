"""What has to be compiled before a kernel can run a call, and what compiles it: the unit of a
warmup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from compile_ext.ops.call_site import Call, CallSite
from compile_ext.ops.device import Target


class Compiler(Protocol):
    """What makes kernels and keeps them in a folder: Triton, CuTe DSL, DeepGEMM, or that of another
    package. Pickled by where it is found: an object of a module, or of a class without state."""

    @property
    def name(self) -> str: ...

    @property
    def needs_device(self) -> bool:
        """Whether it compiles only where the GPU is."""
        ...

    def why_not(self, target: Target) -> str | None:
        """Why it cannot compile for ``target`` in this process, and what to do, or None."""
        ...

    def folder(self) -> Path:
        """Where this process looks for what it has compiled. Need not exist."""
        ...

    def compile(self, unit: CompileUnit, target: Target, stage: Path) -> None:
        """Make what ``folder()`` lacks for this unit, under ``stage``: an empty folder of this unit
        alone, on the disk of ``folder()``. Each file or folder in it is then renamed into
        ``folder()``. Runs in a process of its own, which may be killed at any point. Raises any
        error where it fails: its text is the reason.
        """
        ...

    def arrived(self, entry: Path) -> tuple[str, ...]:
        """Called for each entry, renamed into ``folder()`` or come from another host with it,
        before it is used: mends what depends on where it lies, if anything does.

        Returns the files of the entry, relative to it, that do: their content is not compared with
        what was compiled. Raises ValueError where one of them is damaged.
        """
        ...


@dataclass(frozen=True)
class CompileUnit:
    """One kernel at one key. Units are equal if compiler and key are, and survive pickling.

    Args:
        compiler: what compiles it.
        kernel: the name of the kernel, for people.
        key: what the compiled kernel is found by: the same in each process, another one for another
            release of the compiler, source or architecture.
        calls: what needs it: of many calls that of the fewest tokens, or, where calls of a site
            need one of several kernels and only the calls show which, a call for each. Making them
            loads the kernels.
        made_from: what the key stands for, by name, for people.
        seconds: about how long it takes to compile, of one core: the slow ones begin first.
        how: what the compiler needs to compile it. Stays in its process: ``renewed`` finds it anew.
    """

    compiler: Compiler = field(compare=False)
    kernel: str
    key: str
    calls: tuple[Call, ...] = field(compare=False)
    made_from: tuple[tuple[str, str], ...] = field(compare=False, default=())
    seconds: float = field(compare=False, default=1.0)
    how: Any = field(compare=False, default=None, repr=False)

    def __reduce__(self) -> Any:
        kept = self.compiler, self.kernel, self.key, self.calls, self.made_from, self.seconds
        return CompileUnit, kept


# (site, target, most tokens of a call) -> what has to be compiled for it, none twice.
CompileUnits = Callable[[CallSite, Target, int], tuple[CompileUnit, ...]]


def compiles_nothing(site: CallSite, target: Target, max_tokens: int) -> tuple[CompileUnit, ...]:
    """The ``compile_units`` of an op whose kernels come compiled."""
    return ()
