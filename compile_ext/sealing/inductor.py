"""Inductor: a graph that it generates code for, which it does where no cache has the graph. Under
Dynamo or not, forward or backward, whatever backend called it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile_ext.sealing.calls import described, frames
from compile_ext.sealing.dynamo import module_traced
from compile_ext.sealing.event import CompileEvent
from compile_ext.sealing.patches import Patch
from compile_ext.sealing.telling import surfacing, tell

_FIX = "run the graph with these shapes before the seal: compile_ext.warmup(model, ...), or a call"
_SHOWN = 4


def _watching(generate: Callable[..., Any]) -> Callable[..., Any]:
    def watching(gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tell(lambda: _event(gm, example_inputs))
        return generate(gm, example_inputs, *args, **kwargs)

    return watching


PATCHES = (
    Patch("torch._inductor.compile_fx", "fx_codegen_and_compile", _watching),
    Patch("torch._inductor.compile_fx", "_compile_fx_inner", surfacing),
)


def _event(gm: Any, example_inputs: Any) -> CompileEvent:
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    targets = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    calls = ", ".join(list(dict.fromkeys(targets))[:_SHOWN])
    caller = next((f.f_locals for f in frames() if "key_info" in f.f_locals), {})
    key = caller.get("key_info")
    return CompileEvent(
        "inductor",
        f"a graph of {len(targets)} calls: {calls}",
        described(dict(zip(names, example_inputs, strict=False))),
        key[0] if key else "",
        modules=module_traced(),
        fix=_FIX,
        reason=(caller.get("cache_info") or {}).get("cache_bypass_reason") or "",
    )
