"""``compile_ext.check``: on the first call, run the original and the rewritten graph and compare.

What the passes rewrote is compared where it stands, and at the end what the graph returns. Both
graphs run uncompiled; what they write, they write on copies. A rewritten node takes the original's
value after the comparison, so the first site named is the first one that is wrong, and a legal
difference in rounding does not grow. Costs memory for all intermediates of the original graph,
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import GraphModule, Interpreter, Node

from compile_ext.ops.errors import CheckError
from compile_ext.passes import PassContext
from compile_ext.passes.context import module_hint
from compile_ext.passes.fills.empty import holds_nothing
from compile_ext.passes.op_calls import read_call
from compile_ext.passes.readers import op_name
from compile_ext.passes.values import dtype_name
from compile_ext.records import GraphRecord

Recorded = tuple[Tensor, tuple[int, ...]]  # a copy of the value, and the strides that it had

# A rewrite may drop a rounding to bfloat16 (2^-9 relative) or add the same sum in another order;
# elements near zero are judged against the largest one. Anything beyond is another result, not
# rounding.
RELATIVE = 2.0**-7
ABSOLUTE_OF_MAX = 2.0**-7


def checked(
    run: Callable[..., Any], original: GraphModule, ctx: PassContext, record: GraphRecord
) -> Callable[..., Any]:
    """``run``, with the comparison in front of its first call."""
    pending = [
        (original, ctx)
    ]  # dropped after the comparison: the context holds the first call's parameters

    def first_then_run(*args: Any) -> Any:
        if pending:
            first, context = pending[0]
            values = [table.of([args[i] for i in at]).value for at, table in record.constants]
            compare(first, context, args, values)
            pending.clear()
        return run(*args)

    return first_then_run


def compare(original: GraphModule, ctx: PassContext, args: Any, constants: list[Any]) -> None:
    """Raises CheckError naming the first node whose value differs."""
    devices = sorted({x.device.index or 0 for x in args if isinstance(x, Tensor) and x.is_cuda})
    recorded = _Recorder(original)
    with torch.no_grad(), torch.random.fork_rng(devices):
        recorded.run(*_arguments(ctx, args))
    rewritten = _Comparer(ctx, recorded)
    with torch.no_grad(), torch.random.fork_rng(devices):  # the same random numbers again
        rewritten.run(*_arguments(ctx, args), *constants)
    if rewritten.fault is not None:  # raised here: Interpreter would add its own text to it
        raise rewritten.fault


def _arguments(ctx: PassContext, args: Any) -> list[Any]:
    """The arguments, those that the graph writes as copies."""
    placeholders = ctx.scopes[0].placeholders()
    return [
        x.detach().clone() if isinstance(x, Tensor) and ctx.is_written(p) else x
        for x, p in zip(args, placeholders, strict=False)
    ]


class _Recorder(Interpreter):
    """Runs the original graph and keeps the value and the strides of every node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Recorded] = {}
        self.names = {
            n.name: f"{op_name(n.target)} in {module_hint(n)}" for n in module.graph.nodes
        }

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            for i, x in enumerate(_flat(value)):
                self.values[f"output {i}"] = x.detach().clone(), x.stride()
        elif isinstance(value, Tensor) and n.op != "placeholder" and not _is_wrapped(value):
            self.values[n.name] = value.detach().clone(), value.stride()
        return value


class _Comparer(Interpreter):
    """Runs the rewritten graph and compares what was rewritten, and what the graph returns."""

    def __init__(self, ctx: PassContext, original: _Recorder) -> None:
        super().__init__(ctx.root)
        self.ctx, self.original = ctx, original
        self.fault: CheckError | None = None

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            for i, x in enumerate(_flat(value)):
                self._compare(f"output {i}", f"output {i}", x)
        elif isinstance(value, Tensor) and self._is_rewritten(n) and not _is_wrapped(value):
            name = self.ctx.replaced.get(n.name, n.name)
            self._compare(name, self.original.names.get(name, name), value)
            recorded = self.original.values.get(name)
            if recorded is not None and recorded[0].shape == value.shape:
                value.copy_(recorded[0])
        return value

    def _is_rewritten(self, n: Node) -> bool:
        if n.op == "placeholder" or n.name in self.ctx.changed or holds_nothing(n):
            return False
        return n.name in self.ctx.replaced or read_call(n) is not None

    def _compare(self, name: str, site: str, value: Tensor) -> None:
        recorded = self.original.values.get(name)
        if recorded is not None and self.fault is None:
            self.fault = _fault(site, value, *recorded)


def _flat(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _is_wrapped(value: Tensor) -> bool:
    return bool(is_functorch_wrapped_tensor(value))


def _fault(
    site: str, value: Tensor, expected: Tensor, strides: tuple[int, ...]
) -> CheckError | None:
    where = f"compile_ext.check: {site}"
    fix = "report it, and leave the pass out with compile_ext.disable"
    form = f"{dtype_name(value)} of shape {list(value.shape)}, strides {list(value.stride())}"
    want_form = f"{dtype_name(expected)} of shape {list(expected.shape)}, strides {list(strides)}"
    widened = (expected.dtype, value.dtype) == (torch.bfloat16, torch.float32)  # router logits
    if widened:
        form = form.replace("float32", "bfloat16", 1)
    if form != want_form:
        return CheckError(where, form, f"{want_form} as before", fix)
    if value.layout != torch.strided:
        return None
    got, want = (torch.view_as_real(x) if x.is_complex() else x for x in (value, expected))
    got, want = got.double(), want.double()
    limit = RELATIVE * want.abs() + ABSOLUTE_OF_MAX * _largest(want)
    both_nan = got.isnan() & want.isnan()
    wrong = ~((got - want).abs() <= limit) & ~both_nan & (got != want)
    if not wrong.any():
        return None
    at = tuple(int(i) for i in wrong.nonzero()[0])
    count = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
    found = f"{float(got[at]):.6g} at {list(at)}; {count}"
    return CheckError(where, found, f"{float(want[at]):.6g} as before", fix)


def _largest(x: Tensor) -> Tensor:
    finite = x[x.isfinite()]
    return finite.abs().amax() if finite.numel() else x.new_zeros(())
