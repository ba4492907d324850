"""Run a Gluon kernel on the CPU, one program after another, with torch in the place of Gluon.

Triton's interpreter knows no Gluon. What a program computes does not depend on layouts, so that the
same lines run on plain tensors: what is checked are the addresses, masks and sums. A load or store
outside of its tensor's memory is an error.
"""

from __future__ import annotations

import itertools
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Value(torch.Tensor):
    """A tensor that no statement changes in place: ``x += y`` makes a new one, as in Triton."""

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __imul__(self, other: Any) -> Any:
        return self * other


def value(x: Tensor) -> Tensor:
    return x.as_subclass(Value)


class Pointer:
    """Addresses in the memory of a tensor, counted in elements."""

    def __init__(self, tensor: Tensor, at: Any = None) -> None:
        self.tensor, self.at = tensor, tensor.storage_offset() if at is None else at
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.tensor, self.at + offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The memory, the addresses in it, and which of them count."""
        size = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        memory = self.tensor.as_strided((size,), (1,), 0)
        if not size:  # a masked address needs some memory to stand for it
            memory = self.tensor.new_zeros(1)
        counts = torch.tensor(True) if mask is None else torch.as_tensor(mask)
        at, counts = torch.broadcast_tensors(torch.as_tensor(self.at), counts)
        wanted = at[counts]
        assert not wanted.numel() or (wanted.min() >= 0 and wanted.max() < size), "out of bounds"
        return memory, torch.where(counts, at, 0), counts


def load(at: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    assert other == 0.0
    memory, places, counts = at.places(mask)
    is_fp8 = memory.dtype == torch.float8_e4m3fn  # which torch does not index
    found = (memory.view(torch.uint8) if is_fp8 else memory)[places.long()]
    found = torch.where(counts, found, torch.zeros((), dtype=found.dtype))
    return value(found.view(memory.dtype) if is_fp8 else found)


def store(at: Pointer, x: Tensor, mask: Any = None) -> None:
    memory, places, counts = at.places(mask)
    memory[places[counts].long()] = x.broadcast_to(counts.shape)[counts].as_subclass(Tensor)


def scale(x: Tensor) -> Tensor:
    """In the place of ``_scale``, whose bit casts torch does not have."""
    return value(x.view(torch.float8_e8m0fnu).float()) if x.dtype == torch.uint8 else x


class Launch:
    """Stands for the kernel ``name`` of a module: ``launch[grid](...)`` runs it here."""

    def __init__(self, module: Any, name: str) -> None:
        self._program = [0, 0, 0]
        gl = SimpleNamespace(
            **{x: getattr(torch, x) for x in ("float16", "float32", "int64", "uint8")},
            arange=lambda start, end, layout: value(torch.arange(start, end)),
            full=lambda shape, x, dtype, layout: value(torch.full(shape, x, dtype=dtype)),
            program_id=lambda axis: self._program[axis],
            sum=lambda x, axis: x.sum(axis),
            cdiv=lambda x, y: -(-x // y),
            static_range=range,
            load=load,
            store=store,
            **dict.fromkeys(
                ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"), lambda *args: args
            ),
        )
        names = {**vars(module), "gl": gl, "mma_v2": self._product}
        for x, function in vars(module).items():
            if type(function).__name__ == "GluonJITFunction":
                names[x] = FunctionType(function.fn.__code__, names)
        names["_scale"] = scale
        self._kernel = names[name]

    @staticmethod
    def _product(x: Tensor, y: Tensor, acc: Tensor) -> Tensor:
        assert x.dtype == y.dtype == torch.float16
        return value(x.float() @ y.float() + acc)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> None:
            for name in ("num_warps", "maxnreg", "launch_pdl"):
                options.pop(name, None)
            given = [Pointer(x) if isinstance(x, Tensor) else x for x in args]
            for program in itertools.product(*map(range, grid)):
                self._program[: len(program)] = program
                self._kernel(*given, **options)

        return run
