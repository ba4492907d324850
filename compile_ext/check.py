"""``compile_ext.check``: on the first call, run the original and the rewritten graph and compare
node by node.

Both run uncompiled, and the bodies of higher-order ops are judged by what they return; what the
graph writes, it writes on copies. A rewritten node is judged by itself: after the comparison it
takes the original's value, so the first node named is the first one that is wrong, and a legal
difference in rounding does not grow. Costs memory for all intermediates of the original graph,
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from compile_ext.ops.errors import CheckError
from compile_ext.passes import PassContext
from compile_ext.passes.context import module_hint
from compile_ext.passes.readers import is_empty, op_name, read_call

# A rewrite may drop a rounding to bfloat16 (2^-9 relative) or add the same sum in another order;
# elements near zero are judged against the largest one. Anything beyond is another result, not
# rounding.
RELATIVE = 2.0**-7
ABSOLUTE_OF_MAX = 2.0**-7


def checked(
    run: Callable[..., Any], original: GraphModule, ctx: PassContext, extra: list[Any]
) -> Callable[..., Any]:
    """``run``, with the comparison in front of its first call."""
    pending = [
        (original, ctx)
    ]  # dropped after the comparison: the context holds the first call's parameters

    def first_then_run(*args: Any) -> Any:
        if pending:
            first, context = pending[0]
            compare(first, context, args, [constant(args[i]) for i, constant in extra])
            pending.clear()
        return run(*args)

    return first_then_run


def compare(original: GraphModule, ctx: PassContext, args: Any, constants: list[Tensor]) -> None:
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
    """Runs the original graph and keeps the value of every node."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}
        self.names = {
            n.name: f"{op_name(n.target)} in {module_hint(n)}" for n in module.graph.nodes
        }

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "output"):
            self.values[n.name] = value.detach().clone() if isinstance(value, Tensor) else value
        return value


class _Comparer(Interpreter):
    """Runs the rewritten graph and compares each node that stands for one of the original."""

    def __init__(self, ctx: PassContext, original: _Recorder) -> None:
        super().__init__(ctx.root)
        self.ctx, self.original = ctx, original
        self.fault: CheckError | None = None

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op in ("placeholder", "output") or n.name in self.ctx.changed or is_empty(n):
            return value
        rewritten = n.name in self.ctx.replaced or read_call(n) is not None
        name = self.ctx.replaced.get(n.name, n.name)
        expected = self.original.values.get(name)
        if isinstance(value, Tensor) and isinstance(expected, Tensor):
            self.fault = self.fault or _fault(self.original.names[name], value, expected)
            if rewritten and value.shape == expected.shape:
                value.copy_(expected)
        return value


def _fault(site: str, value: Tensor, expected: Tensor) -> CheckError | None:
    fix = "report it, and leave the pass out with compile_ext.disable"
    if value.shape != expected.shape or value.stride() != expected.stride():
        return CheckError(
            f"compile_ext.check: {site}",
            f"shape {list(value.shape)}, strides {list(value.stride())}",
            f"shape {list(expected.shape)}, strides {list(expected.stride())} as before",
            fix,
        )
    got, want = value.double(), expected.double()
    limit = RELATIVE * want.abs() + ABSOLUTE_OF_MAX * _largest(want)
    both_nan = got.isnan() & want.isnan()
    wrong = ~((got - want).abs() <= limit) & ~both_nan & (got != want)
    if wrong.any():
        at = tuple(int(i) for i in wrong.nonzero()[0])
        count = f"{int(wrong.sum())} of {wrong.numel()} elements differ"
        return CheckError(
            f"compile_ext.check: {site}",
            f"{float(got[at]):.6g} at {list(at)}; {count}",
            f"{float(want[at]):.6g} as before",
            fix,
        )
    return None


def _largest(x: Tensor) -> Tensor:
    finite = x[x.isfinite()]
    return finite.abs().amax() if finite.numel() else x.new_zeros(())
