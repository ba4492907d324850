"""The GPU that a warmup is for, by name."""

from __future__ import annotations

import re

import torch

from compile_ext.ops import device_tables, kernel_table
from compile_ext.ops.device import Target
from compile_ext.ops.errors import ArgumentError

_OLDEST = 7  # major: Triton compiles for nothing older, and sm_10 is a slip of sm_100


def target_named(name: str) -> Target:
    """``sm_90``, or a GPU with a kernel table by its name or a part of it: ``H200``.

    Raises:
        ArgumentError: it is neither, or older than sm_70.
    """
    arch = re.fullmatch(r"sm_?(\d+)(\d)a?", name)
    if arch and int(arch[1]) >= _OLDEST:
        return Target((int(arch[1]), int(arch[2])))
    tables = map(kernel_table.read, sorted(device_tables.SHIPPED.glob("*.json")))
    known = {table.gpu: table for table in tables}
    for gpu, table in known.items():
        if name and name.lower() in gpu.lower():
            digits = table.arch.removeprefix("sm_")
            return Target((int(digits[:-1]), int(digits[-1])), gpu)
    raise ArgumentError(
        "target",
        repr(name),
        f"an architecture from sm_{_OLDEST}0, such as sm_90, or one of {', '.join(known)}",
        "pass one of these, or run where the GPU is without a target",
    )


def target_here() -> Target | None:
    """The GPU of this process, if any."""
    if not torch.cuda.is_available():
        return None
    return Target.here(torch.cuda.current_device())
