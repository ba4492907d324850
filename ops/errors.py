"""The errors of this package: each says what was found, what is wanted, and how to fix it."""

from __future__ import annotations


class CompileExtError(Exception):
    """Base of every error that compile_ext raises on purpose.

    Args:
        where: the op, option or function that refuses, e.g. ``scaled_mm``.
        found: what the caller passed.
        wanted: what is accepted.
        fix: one thing to do about it.
    """

    def __init__(self, where: str, *, found: str, wanted: str, fix: str) -> None:
        self.where, self.found, self.wanted, self.fix = where, found, wanted, fix
        super().__init__(f"{where}: found {found}; wanted {wanted}; fix: {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        # The default pickles `args` alone, which would call __init__ without its keywords.
        return _rebuild, (type(self), self.where, self.found, self.wanted, self.fix)


def _rebuild(
    cls: type[CompileExtError], where: str, found: str, wanted: str, fix: str
) -> CompileExtError:
    return cls(where, found=found, wanted=wanted, fix=fix)


class DtypeError(CompileExtError, TypeError):
    """A tensor has a dtype that the op does not take."""


class DeviceError(CompileExtError, ValueError):
    """The tensors of one call lie on different devices."""


class RankError(CompileExtError, ValueError):
    """A tensor has the wrong number of dimensions."""


class ShapeError(CompileExtError, ValueError):
    """Sizes do not fit together: K of a and b, a scale, a bias."""


class LayoutError(CompileExtError, ValueError):
    """A tensor's strides are not what the op needs."""


class GradError(CompileExtError, RuntimeError):
    """An input needs a gradient; the ops have none."""


class ContractError(CompileExtError, ValueError):
    """A contract does not fit its op's schema, or claims the impossible."""


class OptionError(CompileExtError, ValueError):
    """An unknown or ill-typed option of ``torch.compile(..., options=...)`` or its variables."""


class NotCompiledError(CompileExtError, RuntimeError):
    """Something asks about a compilation that has not happened."""


class CheckError(CompileExtError, AssertionError):
    """``compile_ext.check``: the rewritten graph computes something else than the original."""
