"""What a kernel has to compile before it can run a call: the unit of a warmup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Target:
    """The GPU to compile for, which need not be here.

    Args:
        capability: its compute capability.
    """

    capability: tuple[int, int]


class Site(Protocol):
    """A GEMM call of a compiled graph, as far as kernels ask. A site of the passes is one."""

    @property
    def m(self) -> tuple[int, int | None]: ...  # smallest and largest; None for no upper bound
    @property
    def n(self) -> int | str: ...  # a name where it is symbolic
    @property
    def k(self) -> int | str: ...
    @property
    def a_dtype(self) -> str: ...  # without the prefix torch.
    @property
    def b_dtype(self) -> str: ...
    @property
    def bias(self) -> bool: ...


@dataclass(frozen=True)
class CompileUnit:
    """One kernel at one key. Units are equal if both are, and survive pickling: another process may
    compile them.

    Args:
        kernel: the name of its source.
        key: what the compiled kernel is found by, the same in each process.
        is_cached: whether the result is on disk, and whole.
        compile: makes the result and keeps it, where it is not on disk: True if it did. One process
            of a host does so, the others wait for it. Raises KernelUnavailable where the compiler
            fails.
    """

    kernel: str
    key: str
    is_cached: Callable[[], bool] = field(compare=False)
    compile: Callable[[], bool] = field(compare=False)


# (site, target, most tokens of a call) -> what has to be compiled for it, none twice.
CompileUnits = Callable[[Site, Target, int], tuple[CompileUnit, ...]]
