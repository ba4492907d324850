"""Counters of the programs of a launch that are done, so that the last one can go on with what all
have made. Each is zero between launches: the last program resets it.

No two launches that may run at once share one: launches of a stream follow each other, and of a
CUDA graph no two replays run at once, but they may beside a stream's or another graph's. So each
stream has one, and each launch that a graph captures has one of its own.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from compile_ext.ops.errors import KernelUnavailable

# Of a device: 256 KB, which a captured launch takes 4 bytes of, for good.
_COUNT = 65536
_LOCK = threading.Lock()
_LEFT: dict[int, tuple[Tensor, int]] = {}
_OF_STREAM: dict[tuple[int, int], Tensor] = {}


def counter(x: Tensor) -> Tensor:
    """``[1]`` int32 on the device of ``x``, for one launch on its current stream.

    Raises:
        KernelUnavailable: a graph is captured, and there are none left.
    """
    if not x.is_cuda:
        return x.new_zeros(1, dtype=torch.int32)
    index = x.get_device()
    with torch.cuda.device(index):
        is_captured = torch.cuda.is_current_stream_capturing()
        at = index, torch.cuda.current_stream().cuda_stream
        found = None if is_captured else _OF_STREAM.get(at)
        if found is not None:
            return found
        with _LOCK:
            taken = _take(index, is_captured)
            return taken if is_captured else _OF_STREAM.setdefault(at, taken)


def _take(index: int, is_captured: bool) -> Tensor:
    counters, left = _LEFT.get(index, (None, 0))
    if counters is None or not left:
        if is_captured:  # what is allocated now is the graph's, and not zero before it runs
            raise KernelUnavailable("it has no counters left: call it once outside of a CUDA graph")
        counters, left = torch.zeros(_COUNT, dtype=torch.int32, device="cuda"), _COUNT
        torch.cuda.synchronize()  # zero before any other stream counts
    _LEFT[index] = counters, left - 1
    return counters[left - 1 : left]
