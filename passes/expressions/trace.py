"""From nodes and functions to expressions: run on fakes, and watch the ATen ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from compile_ext.passes.expressions.arithmetic import Arithmetic
from compile_ext.passes.expressions.aten_rules import apply_rule
from compile_ext.passes.expressions.expression import Expr, Table
from compile_ext.passes.expressions.forms import Value
from compile_ext.passes.purity import Recorder
from compile_ext.passes.values import same_size

aten = torch.ops.aten


@dataclass(frozen=True)
class Ref:
    """The tensor of this number in a trace: inputs first, then results in order."""

    at: int


@dataclass(frozen=True)
class Step:
    op: OpOverload
    args: Any
    kwargs: Any
    out: Ref


class Trace(Recorder):
    """The ATen ops of a call and what they hand to each other; ``inputs`` are its tensors."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.result: Ref | None = None
        self.forms: list[tuple[Any, torch.dtype]] = []
        self._tensors: list[Tensor] = []  # kept: an id belongs to a living object
        self._refs: dict[int, Ref] = {}
        for x in inputs:
            self._add(x)
        # One fake for two nodes (a write gives what it has written): which is meant?
        self.is_clear = len(self._refs) == len(inputs)

    def _add(self, x: Tensor) -> Ref:
        ref = self._refs[id(x)] = Ref(len(self._tensors))
        self._tensors.append(x)
        self.forms.append((tuple(x.shape), x.dtype))
        return ref

    def ref(self, x: Any) -> Any:
        return self._refs.get(id(x), Ref(-1)) if isinstance(x, Tensor) else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUSED:
            with self:
                return _decomposed(func, *args, **(kwargs or {}))
        # Called from a decomposition, an op like aten.to is not yet taken apart.
        if _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        before = _mapped(self.ref, args), _mapped(self.ref, kwargs or {})
        out = super().__torch_dispatch__(func, types, args, kwargs)
        first = out[0] if isinstance(out, tuple) and out else out
        if isinstance(first, Tensor) and not self._is_query(func):
            if func._schema.is_mutable:
                self._forget_views(first)
                self.steps.append(Step(func, *before, self._add(first)))
            elif id(first) not in self._refs:
                is_view = func is aten.as_strided.default and _is_reshape(args[0], first)
                op = aten.view.default if is_view else func
                self.steps.append(Step(op, *before, self._add(first)))
        return out

    def done(self, result: Any) -> Trace:
        """Note which tensor the call gives (of several the first), and let go of all of them."""
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        self.result = self._refs.get(id(first))
        self._tensors, self._refs = [], {}
        return self

    def _forget_views(self, written: Tensor) -> None:
        at = written.untyped_storage()._cdata
        for x in self._tensors:
            if x is not written and x.untyped_storage()._cdata == at:
                self.is_clear = False


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Of the leaves of an argument; torch's tree_map takes 30 us."""
    if isinstance(x, (tuple, list)):
        return [_mapped(function, y) for y in x]
    if isinstance(x, dict):
        return {k: _mapped(function, v) for k, v in x.items()}
    return function(x)


# F.rms_norm is one op where eager has a kernel for it (CUDA), else what it is made of.
_FUSED = {aten._fused_rms_norm.default}
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@functools.cache
def _is_composite(func: Any) -> bool:
    if func.namespace != "aten":  # of prim::device the dispatcher knows nothing
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


def _is_reshape(x: Tensor, out: Tensor) -> bool:
    """Whether ``out``, an as_strided of x, has the elements of x in their order."""
    # Loads torch._refs, 0.1 s: not at import time. It adds no guard.
    from torch._prims_common import is_contiguous_or_false

    is_plain = is_contiguous_or_false(x) and is_contiguous_or_false(out)
    is_whole = same_size(x.storage_offset(), out.storage_offset())
    return is_plain and is_whole and same_size(x.numel(), out.numel())


def _decomposed(op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch._decomp import get_decompositions  # loads all decompositions

    return get_decompositions([op])[op](*args, **kwargs)


def evaluate(
    trace: Trace,
    inputs: Sequence[Expr | None],
    make: Arithmetic,
    apply: Callable[..., Expr | None] = apply_rule,
) -> list[Expr | None]:
    """The expression of each tensor in a trace, given those of its inputs."""
    exprs = list(inputs)

    def value(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        if x.at < 0:
            return Value(None, (), torch.float32)
        return Value(exprs[x.at], *trace.forms[x.at])

    for step in trace.steps:
        args, kwargs = _mapped(value, step.args), _mapped(value, step.kwargs)
        out = Value(None, *trace.forms[step.out.at])
        exprs.append(apply(step.op, args, kwargs, out, make))
    return exprs


def expressions_of(
    function: Callable[..., tuple[Tensor, ...]], inputs: dict[str, Tensor], table: Table
) -> list[Expr]:
    """What a function computes, as patterns in which its inputs are variables."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), enable_python_dispatcher(), FakeTensorMode() as mode:
        given = {name: mode.from_tensor(x) for name, x in inputs.items()}
        trace = Trace(list(given.values()))
        with trace:
            results = function(**given)
    exprs = evaluate(trace, [table("var", name) for name in given], Arithmetic(table))
    found = [exprs[trace.ref(x).at] for x in results]
    assert all(x is not None for x in found), f"no rules for {function}: {trace.ops}"
    return [x for x in found if x is not None]
