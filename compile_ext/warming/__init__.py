"""Compile what a manifest needs, before the first request does: in worker processes, each kernel
once a host, into the folders where the compilers look for it.
"""

from compile_ext.warming.certificate import Certificate
from compile_ext.warming.report import WarmupReport
from compile_ext.warming.results import UnitResult
from compile_ext.warming.targets import target_named
from compile_ext.warming.warmup import warmup

__all__ = [
    "Certificate",
    "UnitResult",
    "WarmupReport",
    "target_named",
    "warmup",
]
