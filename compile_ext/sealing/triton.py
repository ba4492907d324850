"""Triton: its compiler is watched where it begins on a source that its cache on disk has not got.

Not by ``knobs.runtime.jit_cache_hook``, which is asked before that cache is: nor by
``knobs.compilation.listener``, which hears of a compile when it is done. Both stay as they are.
Checked with Triton 3.6 and 3.7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile_ext.sealing.calls import frames
from compile_ext.sealing.event import CompileEvent
from compile_ext.sealing.launches import launch_event
from compile_ext.sealing.patches import Patch
from compile_ext.sealing.telling import tell


def _watching(make_ir: Callable[..., Any]) -> Callable[..., Any]:
    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell(lambda: _event(self))
        return make_ir(self, *args, **kwargs)

    return watching


PATCHES = (
    Patch("triton.compiler.compiler", "ASTSource.make_ir", _watching),
    Patch("triton.compiler.compiler", "IRSource.make_ir", _watching),
    Patch("triton.experimental.gluon._runtime", "GluonASTSource.make_ir", _watching),
)


def _event(source: Any) -> CompileEvent:
    launch: dict[str, Any] = {}
    reason = ""
    for frame in frames():
        variables = frame.f_locals
        if frame.f_code.co_name == "run" and "bound_args" in variables and not launch:
            launch = variables["bound_args"]
        elif frame.f_code.co_name == "_bench" and "config" in variables:
            reason = f"autotuning tries {variables['config']}"
            break
    types = {str(name): x for name, x in getattr(source, "signature", {}).items()}
    return launch_event("triton", source.name, source.hash(), launch or types, reason)
