"""What the proofs of all claims share: the call, the child that runs it, and the clean run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload

from compile_ext.ops.contract import Gemm, OpContract
from compile_ext.ops.errors import ChildTrace, ClaimError
from compile_ext.passes.padding.alignment import Widths, argument_widths, growth, padding_of
from compile_ext.testing.arguments import Arguments, Devices
from compile_ext.testing.compare import Difference, bits_differ, tolerance, values_differ
from compile_ext.testing.memory import storage_id, tensors_in
from compile_ext.testing.process.isolated import Isolated, Outcome
from compile_ext.testing.process.messages import Raised

Grow = dict[str, int]  # "n", "k" -> elements


@dataclass
class Trial:
    """One op on one set of inputs.

    Args:
        arguments: by schema name; tensors on the CPU, laid out as the caller's.
        devices: where the tensors of each argument belong.
        clean: the first clean run, once there was one.
        notes: for the report.
    """

    op: OpOverload
    contract: OpContract
    arguments: Arguments
    devices: Devices
    child: Isolated
    where: str
    clean: Outcome | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        schema = self.op._schema.arguments
        self.written = {a.name for a in schema if a.alias_info and a.alias_info.is_write}

    @property
    def baseline(self) -> Outcome:
        assert self.clean is not None  # the clean run comes first
        return self.clean

    @property
    def on_cuda(self) -> bool:
        return any(d.startswith("cuda") for ds in self.devices.values() for d in ds)

    @property
    def gives_elements(self) -> bool:
        """Whether the clean run gave anything that can be compared."""
        outputs = self.outputs(self.baseline).values()
        return any(x.numel() if isinstance(x, Tensor) else x is not None for x in outputs)

    def run(
        self,
        label: str,
        changes: Mapping[str, Any] | None = None,
        op: OpOverload | None = None,
        late: str = "",
    ) -> Outcome | Raised:
        """Run the op with some arguments changed; ``late`` as in ``messages.Request``."""
        arguments = {**self.arguments, **(changes or {})}
        return self.child.run(label, op or self.op, arguments, self.devices_of(arguments), late)

    def devices_of(self, arguments: Arguments) -> list[str]:
        """Of the tensors in ``arguments``, in their order. An argument may have become None."""
        return [
            device
            for name, value in arguments.items()
            for _, device in zip(tensors_in(value), self.devices[name], strict=False)
        ]

    def outputs(self, outcome: Outcome) -> dict[str, Any]:
        """Everything that a run gives, by what messages call it: results, written arguments."""
        paths, _ = pytree.tree_flatten_with_path(outcome.results)
        found = {f"result{pytree.keystr(path)}": leaf for path, leaf in paths}
        for name in outcome.arguments:
            if name in self.written:
                leaves, _ = pytree.tree_flatten_with_path(outcome.arguments[name])
                texts = {f"argument {name!r}{pytree.keystr(p)}": leaf for p, leaf in leaves}
                found |= texts
        return found

    def first_difference(
        self, got: Outcome, want: Outcome, *, close: bool = False
    ) -> tuple[str, Difference] | None:
        """The first output that differs in a bit, or where ``close`` by more than rounding."""
        left, right = self.outputs(got), self.outputs(want)
        if left.keys() != right.keys():
            return "the op", Difference(f"returns {list(left)}", str(list(right)))
        for name, x in left.items():
            y = right[name]
            found = values_differ(x, y, self.tolerance_of(y)) if close else bits_differ(x, y)
            if found is not None:
                return name, found
        return None

    def tolerance_of(self, result: Any) -> float:
        device = "cuda" if self.on_cuda else "cpu"
        return tolerance(result, tensors_in(self.arguments), device)

    def require_same(
        self,
        label: str,
        got: Outcome | Raised,
        want: Outcome,
        fix: str,
        *,
        why: str = "",
        close: bool = False,
    ) -> Outcome:
        """Raises ClaimError where ``got`` is not what the clean run ``want`` gave; ``why`` says
        what a difference means."""
        if isinstance(got, Raised):
            what = f"{label}: the op raises {got.text}"
            raise ClaimError(self.where, what, "what the clean run returns", fix) from got.error
        difference = self.first_difference(got, want, close=close)
        if difference is None:
            return got
        name, found = difference
        how = "within rounding" if close else "bit for bit"
        what = f"{label}: {found.of(name)}{f': {why}' if why else ''}"
        raise ClaimError(self.where, what, f"{found.wanted} {how}", fix)

    def shares_written_memory(self, name: str) -> str | None:
        """Another argument that lies in the same storage, where the op writes one of the two. A
        copy of one alone would be another call."""
        mine = {storage_id(x) for x in tensors_in(self.arguments[name])}
        for other, value in self.arguments.items():
            is_written = name in self.written or other in self.written
            theirs = {storage_id(x) for x in tensors_in(value)}
            if other != name and is_written and mine & theirs:
                return other
        return None

    def tensor(self, name: str) -> Tensor | None:
        value = self.arguments[name]
        return value if isinstance(value, Tensor) else None

    @property
    def gemm(self) -> Gemm:
        assert self.contract.gemm is not None  # the registry refuses align without it
        return self.contract.gemm

    def growth(self) -> tuple[Grow, Grow] | str:
        """N and K, and what each lacks to its multiple; or why that cannot be told."""
        return growth(self, self.gemm)

    def widths(self, sizes: Grow, grow: Grow) -> dict[str, Widths] | str:
        """The arguments that grow and how; or why that cannot be told."""
        return argument_widths(self, self.gemm, sizes, grow)

    def padded(self, widths: dict[str, Widths]) -> dict[str, Tensor]:
        """As the pass pads a weight."""
        return {x: padding_of(self.arguments[x], w)(self.arguments[x]) for x, w in widths.items()}

    def aligned_arguments(self) -> tuple[dict[str, Tensor], str] | None:
        """The inputs padded to the contract's multiples, and what that is in words; None where they
        are aligned, or cannot be padded."""
        found = self.growth() if self.contract.align else "no alignment"
        if isinstance(found, str) or not any(found[1].values()):
            return None
        widths = self.widths(*found)
        return None if isinstance(widths, str) else (self.padded(widths), in_words(*found))


def in_words(sizes: Grow, grow: Grow) -> str:
    return ", ".join(f"{d.upper()} {sizes[d]} -> {sizes[d] + g}" for d, g in grow.items() if g)


def passed_on(raised: Raised) -> Exception:
    """The op's own exception, with the child's trace as its cause."""
    cause = ChildTrace(f"in the child process:\n{raised.trace}")
    error = raised.error or RuntimeError(raised.text)
    error.__cause__ = cause
    return error
