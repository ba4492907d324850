"""A kernel that lets its successor start at once, and writes what the successor reads only later.

Programmatic dependent launch (PDL): a kernel launched with that attribute may start when its
predecessor has executed ``griddepcontrol.launch_dependents`` in every block, before the predecessor
has written anything; ``griddepcontrol.wait`` is where it waits for those writes. A kernel without
the attribute starts when the predecessor has ended, and passes.

Imports Triton; the child imports this file where it has a CUDA tensor to write late.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._ops import OpOverload

from compile_ext.testing.memory import as_bytes, copied, poisoned_copy
from compile_ext.testing.process.child import call, synchronize

CAPABILITY = (9, 0)  # griddepcontrol begins with Hopper
# The producer has to outlast the host's way to the op's first kernel: 200 us, or several times what
# was measured for this op; more than the limit, and the host waits for something.
SPIN_NS, SPIN_LIMIT_NS, SPIN_FACTOR = 200_000, 100_000_000, 4
_ATTEMPTS = 5  # on a busy host one call takes a hundred times as long as another
_BLOCK, _PROGRAMS = 4096, 16  # few blocks: the successor must find free SMs


@triton.jit(do_not_specialize=["size", "spin"])  # type: ignore[untyped-decorator]
def _write_late(source, target, size, spin, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.extra.cuda.gdc_launch_dependents()
    start = tl.extra.cuda.globaltimer()
    now = start
    while now - start < spin:  # ns
        now = tl.extra.cuda.globaltimer()
    for at in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        where = at + tl.arange(0, BLOCK)
        value = tl.load(source + where, mask=where < size)
        tl.store(target + where, value, mask=where < size)


def run_behind_producer(
    op: OpOverload, arguments: dict[str, Any], late: str
) -> tuple[Any, dict[str, Any], str]:
    """Run ``op`` with the argument ``late`` poisoned until the kernel before it writes it.

    Returns:
        Its results, its arguments, and why the run shows nothing ("" where it does).
    """
    truth: Tensor = arguments[late]
    device = truth.device
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return call(op, arguments), arguments, "needs compute capability 9.0 for PDL"
    with torch.cuda.device(device):
        # Compiled, tuned and loaded before: the race is on kernels, not on compilers.
        source = as_bytes(truth)
        _launch(source, torch.empty_like(source), spin_ns=0)
        took_ns = min(_host_ns(op, copied(arguments)) for _ in range(3))
        attempts = 0
        while True:
            attempts += 1
            spin_ns = min(max(SPIN_NS, SPIN_FACTOR * took_ns), SPIN_LIMIT_NS)
            racing = {**copied(arguments), late: poisoned_copy(truth)}
            results, took_ns = _race(op, racing, source, as_bytes(racing[late]), spin_ns)
            if took_ns < spin_ns:
                return results, racing, ""
            if attempts == _ATTEMPTS:
                break
    note = f"the host took {took_ns / 1e3:.0f} us to the end of the op, the kernel before it"
    return results, racing, f"{note} {spin_ns / 1e3:.0f} us: they did not overlap for certain"


def _race(
    op: OpOverload, arguments: dict[str, Any], source: Tensor, target: Tensor, spin_ns: int
) -> tuple[Any, int]:
    """The op behind the producer; its results, and how long the host was busy with both."""
    synchronize(arguments)
    start = time.perf_counter_ns()
    _launch(source, target, spin_ns)
    results = call(op, arguments)
    took_ns = time.perf_counter_ns() - start
    synchronize(arguments)
    return results, took_ns


def _launch(source: Tensor, target: Tensor, spin_ns: int) -> None:
    size = source.numel()
    grid = (min(triton.cdiv(size, _BLOCK), _PROGRAMS),)
    kernel: Any = _write_late
    kernel[grid](source, target, size, spin_ns, BLOCK=_BLOCK)


def _host_ns(op: OpOverload, arguments: dict[str, Any]) -> int:
    """How long the host is busy with one call."""
    synchronize(arguments)
    start = time.perf_counter_ns()
    call(op, arguments)
    took = time.perf_counter_ns() - start
    synchronize(arguments)
    return took
