"""Count the kernels of one call with the profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

# ATen calls that make no data: views, metadata, allocations.
_FREE = {
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided",
        "expand", "flatten", "item", "lift_fresh", "narrow", "permute", "reshape", "resize_",
        "resolve_conj", "resolve_neg", "select", "slice", "split", "split_with_sizes",
        "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view", "_local_scalar_dense",
        "_reshape_alias", "_unsafe_view", "is_nonzero", "result_type", "set_", "unbind",
    )
}  # fmt: skip


def count_kernels(call: Callable[[], Any]) -> int:
    """Kernels that one call runs: launches on a GPU; on a CPU, ATen computations and Inductor's.

    An op of this package counts as one on the CPU. Inductor's C++ functions are seen only where
    they were compiled with ``cpp.enable_kernel_profile``.
    """
    # Read at the first profile; below 6 it prints "USDT: ... profiler_start" to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU]
    cuda = torch.cuda.is_available()
    if cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        call()
        if cuda:
            torch.cuda.synchronize()
    events = profiled.events() or []
    if cuda:
        on_device = [e for e in events if e.device_type == DeviceType.CUDA]
        return sum(not e.name.startswith(("Memcpy", "Memset")) for e in on_device)
    return sum(_count(e) for e in events if e.cpu_parent is None)


def _count(event: FunctionEvent) -> int:
    if event.name.startswith("compile_ext::") or "cpp_fused" in event.name:
        return 1
    below = sum(_count(child) for child in event.cpu_children)
    if below or not event.name.startswith("aten::"):
        return below
    return int(event.name not in _FREE)
