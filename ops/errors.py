"""The errors of this package: each says what was found, what is wanted, and how to fix it."""

from __future__ import annotations

from typing import Any


class CompileExtError(Exception):
    """Base of every error that compile_ext raises on purpose: ``Error(where, found, wanted, fix)``.

    Args:
        where: the op, option or function that refuses, e.g. ``scaled_mm``.
        found: what the caller passed.
        wanted: what is accepted.
        fix: one thing to do about it.
    """

    # No __init__: Dynamo does not trace one, and under fullgraph=True the user would read of that
    # and not of the fault. Without it, Dynamo shows the arguments, and pickle works.

    @property
    def where(self) -> str:
        return str(self.args[0])

    @property
    def found(self) -> str:
        return str(self.args[1])

    @property
    def wanted(self) -> str:
        return str(self.args[2])

    @property
    def fix(self) -> str:
        return str(self.args[3])

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}; wanted {self.wanted}; fix: {self.fix}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"  # what Dynamo shows of an error in a fake


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


class ArgumentError(CompileExtError, ValueError):
    """A number or a name that the op does not take: a top_k of more experts than there are."""


class GradError(CompileExtError, RuntimeError):
    """An input needs a gradient; the ops have none."""


class ContractError(CompileExtError, ValueError):
    """A contract does not fit its op's schema, or claims the impossible."""


class ClaimError(ContractError):
    """A claim of a contract is false: ``check_contract`` ran the op, and it shows."""


class ChildTrace(Exception):
    """The cause of what an op raises under ``check_contract``: the child process's traceback."""


class KernelError(CompileExtError, ValueError):
    """A kernel that a call asks for by name is none of its op's, or cannot run it."""


class TableError(CompileExtError, ValueError):
    """A file is no kernel table, or a table cannot be written."""


class ManifestError(CompileExtError, ValueError):
    """A file is no manifest or cannot be written, or a manifest cannot be divided among ranks."""


class KernelUnavailable(Exception):
    """A kernel finds out as it runs that it cannot, here and in this process: its compiler fails.
    The text is the reason. The dispatcher takes the next kernel, for this call and later ones."""


class CudaError(CompileExtError, RuntimeError):
    """The CUDA driver refuses a launch, or an earlier kernel has failed."""


class SealError(CompileExtError):
    """Something would have to be compiled under a seal: ``SealError(where, found, wanted, fix,
    event)``."""

    @property
    def event(self) -> Any:
        """The :class:`compile_ext.CompileEvent`."""
        return self.args[4]


class OptionError(CompileExtError, ValueError):
    """An unknown or ill-typed option of ``torch.compile(..., options=...)`` or its variables."""


class MarkError(CompileExtError, ValueError):
    """``mark_router`` of what is no module, or has no matrix, or several."""


class NotCompiledError(CompileExtError, RuntimeError):
    """Something asks about a compilation that has not happened."""


class CheckError(CompileExtError, AssertionError):
    """``compile_ext.check``: the rewritten graph computes something else than the original."""


class WarmupError(CompileExtError, RuntimeError):
    """``warmup(strict=True)``: a unit has failed."""


class CacheFolderError(CompileExtError, RuntimeError):
    """A cache folder cannot be used, or no longer: a library has read the name of another one."""


class CertificateError(CompileExtError, ValueError):
    """A file is no certificate, or cannot be written."""


class CaptureError(CompileExtError, RuntimeError):
    """A derived constant would have to be computed while a CUDA graph is captured."""


def in_one_line(error: Exception) -> str:
    """``RuntimeError: <the first line of its text>``, of an error of anyone's."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
