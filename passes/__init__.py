"""FX passes on the Dynamo graph: one file a pass, their order in pipeline.py. Imports torch and ops
only.
"""

from compile_ext.passes.context import PassContext
from compile_ext.passes.derived_inputs import DerivedInput
from compile_ext.passes.pipeline import PASS_NAMES, PASSES, run_passes
from compile_ext.passes.printer import print_graph
from compile_ext.passes.report import Decision, GraphReport, Site
from compile_ext.passes.scopes import copy_module

__all__ = [
    "PASSES",
    "PASS_NAMES",
    "Decision",
    "DerivedInput",
    "GraphReport",
    "PassContext",
    "Site",
    "copy_module",
    "print_graph",
    "run_passes",
]
