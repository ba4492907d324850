"""After the warmup: any further compile is reported or refused, whoever asks for it."""

from compile_ext.sealing.event import CompileEvent
from compile_ext.sealing.switch import Seal, seal

__all__ = ["CompileEvent", "Seal", "seal"]
