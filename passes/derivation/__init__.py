"""Derivations: pure functions of parameters whose result is a derived constant.

One file a kind. Every kind is a hashable callable that takes the sources in order, and equal
derivations of the same parameters share one constant.
"""

from compile_ext.passes.derivation.chain import Chain, Derivation, Step, after, derivation_of
from compile_ext.passes.derivation.padding import Padding
from compile_ext.passes.derivation.program import Program
from compile_ext.passes.derivation.restride import Restride
from compile_ext.passes.derivation.sources import why_not
from compile_ext.passes.derivation.uninitialised import Uninitialised

__all__ = [
    "Chain",
    "Derivation",
    "Padding",
    "Program",
    "Restride",
    "Step",
    "Uninitialised",
    "after",
    "derivation_of",
    "why_not",
]
