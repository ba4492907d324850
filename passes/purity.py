"""Which ATen ops a node of the Dynamo graph stands for, found by running it on fakes.

A Dynamo graph spells one ATen op in many ways; whether a call is pure, pointwise or a reduction is
asked of the ops below it, not of its spelling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from compile_ext.passes.effects import written_arguments
from compile_ext.passes.values import call_on_fakes, fake_mode, in_transform, substitute

_ATEN = ("aten", "prims", "prim")
_NOT_PURE = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
_ATEN_OPS = "compile_ext_aten_ops"  # meta key of a node: what was asked, and the answer
_META_QUERY = torch.ops.prim.device.default  # says nothing of what is computed


class Recorder(TorchDispatchMode):
    """Notes the ATen ops that are called under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_query(func):
            self.ops.append(func)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _is_query(func: Any) -> bool:
        return func is _META_QUERY


def aten_ops(node: Node, scopes: Sequence[Any]) -> list[OpOverload] | None:
    """The ATen ops of a call that writes nothing that it is given, in order; None for other nodes
    and for calls of anything but ATen."""
    # Three passes ask; running a node on fakes takes 0.5 ms.
    known = node.meta.get(_ATEN_OPS)
    if known is None or known[0] != (node.target, node.args, node.kwargs):
        found = run_on_fakes(node, scopes)
        note_ops(node, None if found is None else found[1])
        known = node.meta[_ATEN_OPS]
    ops: list[OpOverload] | None = known[1]
    return ops


def note_ops(node: Node, ops: list[OpOverload] | None) -> None:
    """What ``aten_ops`` is to answer, where a pass knows it."""
    node.meta[_ATEN_OPS] = (node.target, node.args, node.kwargs), ops


def run_on_fakes(
    node: Node,
    scopes: Sequence[Any],
    values: Mapping[Node, Any] | None = None,
    recorder: Recorder | None = None,
    writes: bool = False,
) -> tuple[Any, list[OpOverload]] | None:
    """The result of such a call, with ``values`` in the place of these nodes, and its ATen ops.
    With ``writes`` also of one that writes what it is given, which had better be copies then."""
    if node.op not in ("call_function", "call_method"):
        return None
    if written_arguments(node) and not writes:
        return None
    if isinstance(node.target, HigherOrderOperator) or not _is_known(node.target):
        return None
    if any(map(in_transform, (node, *node.all_input_nodes))):
        return None  # the wrappers of vmap and its like are dead after tracing
    recorder = recorder or Recorder()
    args, kwargs = substitute(node.args, values or {}), substitute(node.kwargs, values or {})
    value = call_on_fakes(node, args, kwargs, fake_mode(scopes), recorder)
    ops = recorder.ops
    return (value, ops) if all(op.namespace in _ATEN for op in ops) else None


def _is_known(target: Any) -> bool:
    """A method or a function of torch or Python; any other (``allow_in_graph``) may hold state."""
    module = getattr(target, "__module__", None) or "torch"
    return isinstance(target, str) or module.split(".")[0] in ("torch", "_operator", "builtins")


def cannot_fail(ops: Sequence[OpOverload]) -> bool:
    """Whatever the values are: a branch that is not taken may invert a singular matrix."""
    return all(
        torch.Tag.pointwise in op.tags
        or torch.Tag.reduction in op.tags
        or op.is_view
        or op._schema.name in _CANNOT_FAIL
        for op in ops
    )


_COPIES = ("_to_copy", "cat", "clone", "constant_pad_nd", "repeat", "stack")
_CANNOT_FAIL = {f"aten::{name}" for name in (*_COPIES, "full", "mm", "new_zeros", "zeros")}


def is_pure(ops: Sequence[OpOverload]) -> bool:
    """The same inputs give the same result: no random numbers, no shape that depends on data."""
    return not any(_NOT_PURE & set(op.tags) for op in ops)
