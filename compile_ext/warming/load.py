"""Make each call of a unit once on the GPU: its kernel is loaded before the first request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compile_ext.ops.call_site import run_calls
from compile_ext.ops.device import Target
from compile_ext.warming.results import UnitResult


def device_for(model: Any, target: Target | None) -> torch.device | None:
    """Where the model's kernels run: the GPU of its first parameter, else this process's current
    one; None where that is not the target's kind."""
    if target is None or not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device()
    if isinstance(model, nn.Module):
        on_gpu = (x.device.index for x in model.parameters() if x.is_cuda)
        index = next(on_gpu, index)
    here = Target.here(index)
    if here.capability != target.capability or (target.gpu and here.gpu != target.gpu):
        return None
    return torch.device("cuda", index)


def load_kernel(result: UnitResult, device: torch.device) -> UnitResult:
    """The result of a kernel that is on disk, after it was launched there; one that cannot be has
    failed."""
    try:
        with torch.cuda.device(device), torch.inference_mode():
            run_calls(result.unit.calls, device)
            torch.cuda.synchronize(device)
    except Exception as error:  # of any library; the report has it
        reason = f"is on disk, and cannot be launched: {type(error).__name__}: {error}"
        return replace(result, status="failed", reason=reason)
    return result
