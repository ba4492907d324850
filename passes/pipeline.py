"""The passes in their order, and the one function that runs them.

To add a pass: a file with one function of its name, one line in PASSES, one test file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from torch._logging._internal import trace_structured
from torch.fx import Graph

from compile_ext.passes.collect_sites import collect_sites
from compile_ext.passes.context import PassContext
from compile_ext.passes.fold_parameter_math import fold_parameter_math
from compile_ext.passes.fold_weight_padding import fold_weight_padding
from compile_ext.passes.fuse_norm_quantize import fuse_norm_quantize
from compile_ext.passes.fuse_router import fuse_router
from compile_ext.passes.lower_router_linear import lower_router_linear
from compile_ext.passes.lower_router_norm import lower_router_norm
from compile_ext.passes.lower_router_topk import lower_router_topk
from compile_ext.passes.pin_kernels import pin_kernels
from compile_ext.passes.prefetch_weights import prefetch_weights
from compile_ext.passes.printer import print_graph
from compile_ext.passes.quantize_activations import quantize_activations
from compile_ext.passes.regions import mark_regions
from compile_ext.passes.specialize_m1 import specialize_m1
from compile_ext.passes.strip_placeholder_fills import strip_placeholder_fills

log = logging.getLogger(__name__)

Pass = Callable[[Graph, PassContext], None]

PASSES: tuple[Pass, ...] = (
    fold_parameter_math,  # first: what it makes a constant, the next one can pad
    quantize_activations,  # what it inserts, the next one fuses
    fuse_norm_quantize,  # before padding, which computes a quantization at other extents
    fold_weight_padding,  # early: it changes N and K, which everything after it reads
    strip_placeholder_fills,  # after folding: a fill that fed a folded pad is gone by now
    lower_router_linear,  # makes the ops that the next two look for
    lower_router_norm,  # what is right before them
    specialize_m1,  # it only exchanges one op for another
    lower_router_topk,  # behind the ops that the two have made
    fuse_router,  # the last to make ops: it joins what the passes before have made
    prefetch_weights,  # after all rewrites: which call is the first of the graph is settled
    pin_kernels,  # after the ops are what they stay
    collect_sites,  # last: sees the graph as it is compiled
)

PASS_NAMES = tuple(p.__name__ for p in PASSES)


def run_passes(ctx: PassContext, disable: Collection[str] = ()) -> None:
    """Run the passes on the root graph and on the bodies of its higher-order ops.

    Each graph before and after each pass goes to the log (``TORCH_LOGS="+compile_ext"``) and, as
    artifacts, to torch's structured trace (``TORCH_TRACE``).
    """
    ctx.report.disabled = tuple(name for name in PASS_NAMES if name in disable)
    mark_regions(ctx)
    _show(ctx, "compile_ext_before_passes")
    for run in PASSES:
        name = run.__name__
        if name in disable:
            continue
        ctx.pass_name = name
        start = time.perf_counter()
        for scope in ctx.scopes:
            run(scope.graph, ctx)
        ctx.report.seconds[name] = time.perf_counter() - start
        _show(ctx, f"compile_ext_after_{name}")
    ctx.derived.drop_unused()
    for scope in ctx.scopes:
        scope.graph.lint()
        scope.module.recompile()
    ctx.report.finish()


def _show(ctx: PassContext, name: str) -> None:
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", name, print_graph(ctx.root))
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: print_graph(ctx.root),
    )
