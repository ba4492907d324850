"""What a seal says of a compile."""

from __future__ import annotations

from dataclasses import dataclass

from compile_ext.ops.errors import SealError


@dataclass(frozen=True)
class CompileEvent:
    """Something was compiled, or would have been, under a seal.

    Args:
        kind: ``triton``, ``cute``, ``deep_gemm``, ``inductor`` or ``dynamo``: who compiles.
        kernel: its name; of ``dynamo`` the function and its place, of ``inductor`` the graph.
        shapes: of the arguments, as ``a: float8_e4m3fn[4097, 7168]``.
        key: what the compiler finds it by; "" where it has none before it compiles.
        op: the op of this package that called it; "" where none did.
        modules: paths of the modules whose weights, or graph, it is for; those that are known.
        fix: what would have compiled it before.
        reason: why what there was did not do: the guards that failed; "" where nothing was.
    """

    kind: str
    kernel: str
    shapes: tuple[str, ...] = ()
    key: str = ""
    op: str = ""
    modules: tuple[str, ...] = ()
    fix: str = ""
    reason: str = ""

    def __str__(self) -> str:
        """A line."""
        return f"{self.what()}; fix: {self.fix}"

    def what(self) -> str:
        """All but the fix."""
        text = f"{self.kind} compiles {self.kernel}"
        if self.shapes:
            text += f" ({', '.join(self.shapes)})"
        if self.op:
            text += f" for {self.op}"
        if self.modules:
            text += f" of {', '.join(self.modules)}"
        if self.key:
            text += f" [key {self.key}]"
        return text + (f": {self.reason}" if self.reason else "")

    def error(self) -> SealError:
        return SealError("seal", self.what(), "nothing to compile", self.fix, self)
