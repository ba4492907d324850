"""compile_ext: what serving engines hand-code per layer, for every model under ``torch.compile``.

``torch.compile(model, backend="compile_ext")`` runs the passes of :mod:`compile_ext.passes` on each
graph; the ops are in :mod:`compile_ext.ops`, the layers that use them in :mod:`compile_ext.layers`.
"""

from compile_ext import ops
from compile_ext.explain import explain
from compile_ext.manifest import Manifest, ManifestSite, NotCovered, collect, sites
from compile_ext.marks import mark_router
from compile_ext.ops.contract import Align, Gemm, Memory, OpContract, Pad
from compile_ext.ops.device import Target, as_if_on
from compile_ext.ops.errors import CompileExtError, SealError
from compile_ext.ops.registry import register_contract
from compile_ext.report import Fallback, Report, Row
from compile_ext.sealing import CompileEvent, seal
from compile_ext.warming import Certificate, WarmupReport, target_named, warmup
from compile_ext.weights import prepare, refresh, restore

__version__ = "0.1.0"

__all__ = [
    "Align",
    "Certificate",
    "CompileEvent",
    "CompileExtError",
    "Fallback",
    "Gemm",
    "Manifest",
    "ManifestSite",
    "Memory",
    "NotCovered",
    "OpContract",
    "Pad",
    "Report",
    "Row",
    "SealError",
    "Target",
    "WarmupReport",
    "as_if_on",
    "collect",
    "explain",
    "mark_router",
    "ops",
    "prepare",
    "refresh",
    "register_contract",
    "restore",
    "seal",
    "sites",
    "target_named",
    "warmup",
]
