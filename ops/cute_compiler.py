"""Compile CuTe DSL kernels ahead of their first launch, on any host."""

from __future__ import annotations

from pathlib import Path

from compile_ext.ops import compiled_cache, cute_support
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target
from compile_ext.ops.renew import renewed


class CuteCompiler:
    """CuTe DSL, whose cubins this package keeps itself: a file each, found by its content alone, so
    that a folder may be moved."""

    name = "cute"
    needs_device = False

    def why_not(self, target: Target) -> str | None:
        if target.capability < cute_support.MIN_CAPABILITY:
            wanted = ".".join(map(str, cute_support.MIN_CAPABILITY))
            return f"needs compute capability {wanted}"
        return cute_support.why_no_compiler()

    def folder(self) -> Path:
        return compiled_cache.folder()

    def compile(self, unit: CompileUnit, target: Target, stage: Path) -> None:
        key, compile = renewed(unit, target).how
        compiled_cache.write(stage / key.pattern(), key, compile())

    def arrived(self, entry: Path) -> tuple[str, ...]:
        return ()


CUTE = CuteCompiler()
