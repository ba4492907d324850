"""Take the manifest of a model from its compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from compile_ext.live_graphs import LiveGraphs, look
from compile_ext.manifest.manifest import Manifest, ManifestSite, NotCovered
from compile_ext.ops import device
from compile_ext.ops.device import Target, as_if_on
from compile_ext.passes.report import Entry


def sites(model: Any) -> Manifest:
    """What the compiled graphs of a model call: all graphs that were compiled and are alive, of all
    ranges of M, frames and subgraphs, also where the compiled code came from a cache.

    Args:
        model: an nn.Module, what ``torch.compile`` returned for one, or a compiled function.

    Raises:
        NotCompiledError: nothing of this model was compiled by this backend.
    """
    return _manifest(LiveGraphs(model))


def _manifest(graphs: LiveGraphs) -> Manifest:
    if not graphs.records:
        raise graphs.not_compiled("sites", "collect(model, *example_arguments)")
    uses = [(e, name) for record in graphs.records for e, name, _ in graphs.uses(record)]
    return Manifest(
        tuple(ManifestSite(e.call, (name,)) for e, name in uses if e.call is not None),
        tuple(_missing(uses)),
    )


def collect(model: Any, /, *args: Any, **kwargs: Any) -> Manifest:
    """What a model calls for these arguments: it is compiled with inner ``eager``, only to look,
    and runs once, as for ``explain(model, *args)``: no kernel is compiled, and what the model
    writes (a KV cache) is written.

    On the device ``meta`` nothing runs, and no weights are needed. The passes then go by the GPU
    that such tensors stand for: that of ``with as_if_on(Target(...))``, else the one that is here.

    Args:
        model: an nn.Module, what ``torch.compile`` returned for one, or a function.
        args, kwargs: of one call; models among them are looked at too. A size that
            ``torch._dynamo.mark_dynamic`` marks gives a range of M; collect a call of one token as
            well, where the model serves some: it is another graph, and ``merge`` joins the two.
            What was compiled before is included.
    """
    with _as_if_here(args, kwargs):
        look(model, *args, **kwargs)
        return _manifest(LiveGraphs(model, *args, **kwargs))


def _as_if_here(*arguments: Any) -> AbstractContextManager[None]:
    is_meta = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves(arguments))
    if not is_meta or device.target() is not None or not torch.cuda.is_available():
        return nullcontext()
    return as_if_on(Target.here(torch.cuda.current_device()))


def _missing(uses: list[tuple[Entry, str]]) -> Iterator[NotCovered]:
    for entry, name in uses:
        if entry.not_covered is not None:
            yield NotCovered(entry.op, (name,), entry.not_covered)
