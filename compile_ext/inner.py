"""What compiles the rewritten graph: Inductor, AOTAutograd alone, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch.fx import GraphModule

from compile_ext.ops import column_major, triton_support
from compile_ext.options import Options


def compile_inner(
    gm: GraphModule, inputs: Sequence[Any], options: Options, name: str | None
) -> Callable[..., Any]:
    """Compile ``gm`` as ``options.inner`` says; ``name`` is the compiled region's, for Inductor's
    logs.
    """
    if options.inner == "eager":
        return gm.forward
    if options.inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        compiled: Callable[..., Any] = aot_eager(gm, list(inputs))
        return compiled
    from torch._inductor.compile_fx import compile_fx

    column_major.register_lowering()
    triton_support.keep_cache_folder()
    # torch 2.11 and 2.12 neither pass a name nor take one.
    region: dict[str, Any] = {"compile_region_name": name} if name else {}
    run: Any = compile_fx(gm, list(inputs), config_patches=options.inductor or None, **region)
    return cast(Callable[..., Any], run)
