"""The Dynamo backend: copy the graph, run the passes, compile what is left, hand in the derived
constants.

Registered through the entry point group ``torch_dynamo_backends`` as ``compile_ext``. Passes run
here, on the Dynamo graph, and not inside Inductor: only here are the real parameters handed over,
only here do passes run when the compiled code comes from a cache, and the rewritten graph is what
the caches hash.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import CompileContext
from torch.fx import GraphModule

from compile_ext import homes, marks, records
from compile_ext.bindings import Table
from compile_ext.check import checked
from compile_ext.derived import constants
from compile_ext.inner import compile_inner
from compile_ext.ops import device
from compile_ext.options import Options
from compile_ext.passes import DerivedInput, PassContext, copy_module, run_passes

Compiled = Callable[..., Any]


def compile_ext_backend(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    name: str | None = None,
) -> Compiled:
    """``torch.compile(model, backend="compile_ext")`` calls this once for each graph.

    Args:
        gm: Dynamo's graph; it is not changed.
        inputs: its inputs, parameters among them, as they are in this call.
        mode: torch.compile's mode.
        options: Inductor options and ``compile_ext.*`` options, see :mod:`compile_ext.options`.
        name: the name of the compiled region (torch 2.15 passes it).

    Raises:
        OptionError: an unknown or ill-typed option.
    """
    parsed = Options.parse(mode, options)
    start = time.perf_counter()
    cost = homes.cost if parsed.rehome else homes.cost_in_place
    ctx = PassContext(
        copy_module(gm),
        inputs,
        parsed.memory_budget,
        cost,
        parsed.poison,
        parsed.kernels,
        parsed.batch_invariant,
        parsed.why_no_pdl(),
        parsed.bf16_router,
        marks.positions(inputs),
    )
    run_passes(ctx, parsed.disable)

    derived = zip(ctx.derived.inputs(), ctx.derived.fakes(), strict=True)
    tables = tuple(_table(d, inputs, parsed.rehome, fake.device) for d, fake in derived)
    # Fakes stand in for the constants: a real tensor that Dynamo has not seen would get symbols of
    # its own for its sizes under dynamic=True, and nothing is computed before the first call.
    compiled = compile_inner(ctx.root, [*inputs, *ctx.derived.fakes()], parsed, name)
    seconds = time.perf_counter() - start

    named = {i for e in ctx.report.entries for i in e.weights}
    weights = tuple(sorted(named.union(*(at for at, _ in tables))))
    compile_id = str(CompileContext.current_compile_id())
    call_inputs = frozenset(i for i in weights if not ctx.is_static(i))
    record = records.GraphRecord(
        ctx.report,
        _place(gm),
        weights,
        call_inputs=call_inputs,
        constants=tables,
        backend_seconds=seconds,
        compile_id=compile_id,
        target=device.target(),
    )
    records.add(record)
    # Nothing to hand in, nothing to name: nothing in between.
    if not weights and not tables and not parsed.check:
        records.keep(record, compiled)
        return compiled
    run = _with_constants(compiled, record)
    return checked(run, copy_module(gm), ctx, record) if parsed.check else run


def _table(
    derived: DerivedInput, inputs: Sequence[Any], rehome: bool, device: torch.device
) -> Table:
    sources = [inputs[i] for i in derived.sources]
    return derived.sources, constants(derived.derivation, sources, rehome, device)


def _with_constants(compiled: Compiled, record: records.GraphRecord) -> Compiled:
    """The compiled call, with the derived constants of the live arguments behind its own arguments.

    Also notes which parameters the graph serves, and keeps the record alive as long as itself.
    """
    take = _taker(record.weights)
    bindings = record.bindings

    def run(*args: Any) -> Any:
        weights = take(args)
        binding = bindings.get(tuple(map(id, weights))) or record.bind(weights, args)
        return compiled(*args, *binding.values(args))

    def run_plain(*args: Any) -> Any:
        weights = take(args)
        if tuple(map(id, weights)) not in bindings:
            record.bind(weights, args)
        return compiled(*args)

    return run if record.constants else run_plain


def _taker(positions: tuple[int, ...]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda args: [args[i] for i in positions]


def _place(gm: GraphModule) -> records.Place | None:
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    stack = getattr(reason, "user_stack", None)
    if not stack:
        return None
    frame = stack[0]  # the frame that Dynamo compiled; what it inlined comes after
    broke = str(reason.reason) if getattr(reason, "graph_break", False) else None
    return records.Place(frame.filename, frame.lineno or 0, frame.name, broke)


def _reset() -> None:
    """``torch._dynamo.reset()`` calls this: CUDA graphs of dropped compilations go too."""
    records.note_reset()
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None and torch.cuda.is_initialized():
        trees.reset_cudagraph_trees()


compile_ext_backend.reset = _reset  # type: ignore[attr-defined]
