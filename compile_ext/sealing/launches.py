"""The event of a kernel that a call needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compile_ext.sealing.calls import described, fix_for, op_call
from compile_ext.sealing.event import CompileEvent
from compile_ext.sealing.modules import modules_of


def launch_event(
    kind: str, kernel: str, key: str, arguments: Mapping[str, Any], reason: str = ""
) -> CompileEvent:
    """With the op of this package whose call is on the stack, if one is.

    Args:
        arguments: of the launch; the op's are shown where there is one.
    """
    call = op_call()
    shown = arguments if call is None else call.arguments
    weights = arguments.values() if call is None else call.weights
    return CompileEvent(
        kind,
        kernel,
        described(shown),
        key,
        "" if call is None else call.op,
        modules_of(weights),
        fix_for(call),
        reason,
    )
