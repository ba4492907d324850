"""Derived constants: tensors computed from one parameter, kept fresh, belonging to the parameter.

One compiled graph serves many parameters (eight layers under ``layer.compile()``, two instances of
a class), and one parameter may be read by many graphs (M == 1 and dynamic M). So a constant is
looked up by (derivation, identity of the parameter), shared by all graphs, and freed with the
parameter.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from compile_ext.passes.derivation import Derivation


class _Constant:
    """A derived tensor and the stamp of the parameter that it was computed from."""

    __slots__ = ("pointer", "source", "value", "version")

    def __init__(self, source: weakref.ref[Tensor]) -> None:
        self.source = source
        self.value: Tensor | None = None
        self.version = self.pointer = -1


class Constants:
    """All constants of one derivation: call it with the live parameter to get the tensor.

    The value is refreshed in place when the parameter's version counter or address has moved, so
    that its own address stays valid for CUDA graphs. Writes that move neither (``p.data.copy_``)
    are not seen.
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
            or constant.pointer != source.data_ptr()
        ):
            return self._compute(source)
        assert constant.value is not None
        return constant.value

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
            stamp = source._version, source.data_ptr()
            if constant.value is not None and stamp == (constant.version, constant.pointer):
                return constant.value  # another thread was faster
            value = self.derivation(source)
            self.refreshes += 1
            old = constant.value
            if old is not None and old.device == value.device and old.dtype == value.dtype:
                old.copy_(value)
            else:
                constant.value = old = value
            constant.version, constant.pointer = stamp
            return old

    def _forget(self, key: int) -> None:
        constant = self._constants.get(key)
        if (
            constant is not None and constant.source() is None
        ):  # not a newer tensor with the same id
            self._constants.pop(key, None)


_SHARED: weakref.WeakValueDictionary[Derivation, Constants] = weakref.WeakValueDictionary()


def constants(derivation: Derivation) -> Constants:
    """The constants of a derivation, shared by all graphs that use it and freed with the last of
    them.
    """
    found = _SHARED.get(derivation)
    if found is None:
        found = _SHARED[derivation] = Constants(derivation)
    return found
