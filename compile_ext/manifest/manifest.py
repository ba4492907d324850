"""``Manifest``: every form of call in the graphs of a model, and the calls that it cannot tell
of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compile_ext.ops.call_site import CallSite

# Which dimension each rank of a tensor-parallel group has a part of; None: all of both.
Shard = Literal["n", "k", "batch"]


@dataclass(frozen=True)
class ManifestSite:
    """One form of call.

    Args:
        call: the op, its arguments without data, and the range of M.
        modules: the module paths that make it.
    """

    call: CallSite
    modules: tuple[str, ...]


@dataclass(frozen=True)
class NotCovered:
    """Calls of an op that no warmup makes, or of which it does not know what they compile.

    Args:
        op: ``namespace::name``.
        modules: the module paths that make them.
        reason: why, and what to do.
    """

    op: str
    modules: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Manifest:
    """What a model calls. Equal models give equal manifests, whatever their weights: equal calls
    are one site, and the order is that of the contents.

    Args:
        sites: each form of call once for each range of M.
        not_covered: what is missing. A call whose op does not say what it compiles is in both.
    """

    sites: tuple[ManifestSite, ...] = ()
    not_covered: tuple[NotCovered, ...] = ()

    def __post_init__(self) -> None:
        calls = _united((s.call, s.modules) for s in self.sites)
        sites = [ManifestSite(call, modules) for call, modules in calls.items()]
        object.__setattr__(self, "sites", tuple(sorted(sites, key=_order)))
        missing = _united(((x.op, x.reason), x.modules) for x in self.not_covered)
        found = [NotCovered(op, modules, why) for (op, why), modules in sorted(missing.items())]
        object.__setattr__(self, "not_covered", tuple(found))

    def merge(self, *others: Manifest) -> Manifest:
        """What this and the others have together."""
        every = (self, *others)
        return Manifest(
            tuple(site for x in every for site in x.sites),
            tuple(missing for x in every for missing in x.not_covered),
        )

    def scaled(
        self, tensor_parallel: int, shards: Mapping[str, Shard | None] | None = None
    ) -> Manifest:
        """What each rank of a tensor-parallel group calls, where this is the whole model: for
        planning, where no rank has been compiled.

        Args:
            tensor_parallel: how many ranks.
            shards: which dimension is divided, by patterns of module paths
                (``{"*.attn.proj": "k", "*.router": None}``); the first that fits. Others go by
                their names: see ``scaling.py``.

        Raises:
            ManifestError: a size does not divide, or nobody has registered an op here.
        """
        from compile_ext.manifest.scaling import scaled

        return scaled(self, tensor_parallel, shards or {})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, in one step: whoever reads it meanwhile gets the old one or the new.

        Raises:
            ManifestError: it cannot be written.
        """
        from compile_ext.manifest.file import write

        write(Path(path), self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read what ``save`` wrote. Ops that nobody has registered here are fine: another package
        may do so later.

        Raises:
            ManifestError: it cannot be read, or is no manifest; nothing in it is run.
        """
        from compile_ext.manifest.file import read

        return read(Path(path))


def _united(parts: Iterable[tuple[Any, tuple[str, ...]]]) -> dict[Any, tuple[str, ...]]:
    found: dict[Any, set[str]] = {}
    for key, modules in parts:
        found.setdefault(key, set()).update(modules)
    return {key: tuple(sorted(modules, key=_by_number)) for key, modules in found.items()}


def _by_number(module: str) -> list[tuple[int, int, str]]:
    """``layers.2`` before ``layers.10``."""
    parts = re.split(r"([0-9]+)", module)
    return [(0, int(x), "") if i % 2 else (1, 0, x) for i, x in enumerate(parts)]


def _order(site: ManifestSite) -> tuple[Any, ...]:
    call = site.call
    low, high = call.m
    sizes = [-1 if x is None else x for x in (call.n, call.k, high)]
    return call.op, *sizes, low, repr(call.arguments)
