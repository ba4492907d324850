"""Derived constants: tensors computed from one parameter, kept fresh, belonging to the parameter.

One compiled graph serves many parameters (eight layers under ``layer.compile()``, two instances of
a class), and one parameter may be read by many graphs (M == 1 and dynamic M). So a constant is
looked up by (derivation, identity of the parameter), shared by all graphs, and freed with the
parameter.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from compile_ext.passes.derivation import Derivation


def _slow_storage_of(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


# Address of the StorageImpl: identifies a storage as long as someone holds it, if only weakly.
# The private function makes no Python object for the storage: 158 against 226 ns.
_storage_of: Callable[[Tensor], int] = getattr(torch._C, "_storage_address", _slow_storage_of)


class _Constant:
    """A derived tensor and the stamp of the parameter that it was computed from."""

    __slots__ = ("address", "pointer", "source", "storage", "strides", "value", "version")

    def __init__(self, source: weakref.ref[Tensor]) -> None:
        self.source = source
        self.value: Tensor | None = None
        self.version = self.address = self.pointer = -1
        self.strides: tuple[int, ...] = ()  # torch 2.11 guards no strides of parameters
        # A weak reference to the storage: while it exists, no other storage has the same identity.
        # (The allocator hands out the address of freed data again: `p.data = ...` twice.)
        self.storage: StorageWeakRef | None = None


class Constants:
    """All constants of one derivation: call it with the live parameter to get the tensor.

    The value is refreshed in place when the parameter's version counter, storage, address or
    strides have moved, so that its own address stays valid for CUDA graphs. Writes that move none
    of these (``p.data.copy_``) are not seen, but for those of an optimizer's step.
    """

    def __init__(self, derivation: Derivation) -> None:
        self.derivation = derivation
        self.refreshes = 0  # computations so far, the first of each parameter included
        self._constants: dict[int, _Constant] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._constants)

    def __call__(self, source: Tensor) -> Tensor:
        constant = self._constants.get(id(source))
        if (
            constant is None
            or constant.source() is not source
            or constant.version != source._version
            or constant.address != _storage_of(source)
            or constant.pointer != source.data_ptr()
            or constant.strides != source.stride()
        ):
            return self._compute(source)
        assert constant.value is not None
        return constant.value

    def invalidate(self, source: Tensor) -> None:
        """Compute the constant of this parameter anew on the next call."""
        constant = self._constants.get(id(source))
        if constant is not None and constant.source() is source:
            constant.version = -1

    def _compute(self, source: Tensor) -> Tensor:
        # Outside inference mode: a tensor made inside could not be refreshed outside it.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if isinstance(source, FakeTensor) or source.is_inference():
                # No stamp to see an update by: computed on each call.
                return self.derivation(source)
            key = id(source)
            constant = self._constants.get(key)
            if constant is None or constant.source() is not source:
                constant = _Constant(weakref.ref(source, lambda _: self._forget(key)))
                self._constants[key] = constant
            # The stamp is read before the data: a write in between makes the next call compute
            # again.
            stamp = source._version, _storage_of(source), source.data_ptr(), source.stride()
            if stamp == (
                constant.version,
                constant.address,
                constant.pointer,
                constant.strides,
            ):
                assert constant.value is not None
                return constant.value  # another thread was faster
            value = self.derivation(source)
            self.refreshes += 1
            old = constant.value
            if old is not None and _same_form(old, value):
                old.copy_(value)
            else:
                constant.value = old = value
            constant.storage = StorageWeakRef(source.untyped_storage())
            constant.version, constant.address, constant.pointer, constant.strides = stamp
            return old

    def _forget(self, key: int) -> None:
        constant = self._constants.get(key)
        if (
            constant is not None and constant.source() is None
        ):  # not a newer tensor with the same id
            self._constants.pop(key, None)


def _same_form(x: Tensor, y: Tensor) -> bool:
    return (x.device, x.dtype, x.shape, x.stride()) == (y.device, y.dtype, y.shape, y.stride())


# A graph is compiled for one form of a parameter (Dynamo guards it), so each form has its table.
Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
_SHARED: weakref.WeakValueDictionary[tuple[Derivation, Form], Constants] = (
    weakref.WeakValueDictionary()
)


def constants(derivation: Derivation, source: Tensor) -> Constants:
    """The constants of a derivation for parameters of the form of ``source`` (dtype, shape,
    strides): shared by all graphs that use it, and freed with the last of them.
    """
    key = derivation, (source.dtype, tuple(source.shape), source.stride())
    found = _SHARED.get(key)
    if found is None:
        _watch_optimizers()
        found = _SHARED[key] = Constants(derivation)
    return found


@functools.cache
def _watch_optimizers() -> None:
    """A fused optimizer (AdamW, SGD with ``fused=True``) moves no version counter."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for table in list(_SHARED.values()):
                    table.invalidate(parameter)

    register_optimizer_step_post_hook(after_step)
