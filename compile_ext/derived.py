"""Derived constants: tensors computed from parameters, kept fresh, belonging to the parameters; and
those that come from none, which belong to the graphs that read them.

One compiled graph serves many parameters (eight layers under ``layer.compile()``, two instances of
a class), and one parameter may be read by many graphs (M == 1 and dynamic M). So a constant is
found by (derivation, identity of the parameters), shared by all graphs, and freed with the
parameters. Two things can stand behind one, and the graph is the same for both: the buffer that the
parameter has moved into (``homes.py``), or a copy, refreshed in place.

Who synchronises: a refresh waits for the device before it writes (graphs that still read the old
value on any stream), and for its own copy before any thread can see the constant as fresh. Ordering
the *write to the parameter* before the next call is the writer's, as for any reader of it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from compile_ext import homes
from compile_ext.ops.errors import CaptureError
from compile_ext.passes.derivation import Derivation, Padding

_LOCK = threading.RLock()  # one refresh at a time: two tables may want to move one parameter
_STALE = -1
# Another object as soon as a stamp has gone stale by itself: who has seen this one has seen that.
expired: list[object] = [object()]


class Stamp:
    """What one source of a constant was when the constant was computed.

    A moved ``version`` counter tells a write in place, a moved ``pointer`` (address) new memory.
    The allocator hands out the address of freed memory again (``p.data = ...`` twice), so the
    stamp goes stale as soon as the storage it saw is freed.
    """

    __slots__ = (*("__weakref__", "is_contiguous", "pointer", "storage", "strides", "version"),)

    def __init__(self, source: Tensor, is_home: bool) -> None:
        # None: writes need not be seen, the buffer is the parameter's own memory, and its address
        # is not handed out again as long as the constant holds it.
        self.version = None if is_home else source._version
        self.pointer = source.data_ptr()
        self.strides = source.stride()
        me = weakref.ref(self)

        def forget(_: object) -> None:
            stamp = me()
            if stamp is not None:
                stamp.expire()

        self.storage = None if is_home else weakref.ref(source.untyped_storage(), forget)

    def expire(self) -> None:
        self.pointer = _STALE
        expired[0] = object()

    def fits(self, source: Tensor) -> bool:
        return (
            self.pointer == source.data_ptr()
            and (self.version is None or self.version == source._version)
            and self.strides == source.stride()
        )


class Constant:
    """A derived tensor.

    ``value`` is what the graph gets (None before the first refresh), ``stamps`` has one for each
    source (None where they cannot be watched), ``kind`` says how it is kept.

    Args:
        sources: the parameters, weakly.
    """

    __slots__ = ("kind", "sources", "stamps", "value")

    def __init__(self, sources: tuple[weakref.ref[Tensor], ...]) -> None:
        self.sources = sources
        self.value: Tensor | None = None
        self.stamps: list[Stamp] | None = None
        self.kind = ""

    def is_fresh(self, sources: Sequence[Tensor]) -> bool:
        return self.stamps is not None and all(
            s.fits(x) for s, x in zip(self.stamps, sources, strict=True)
        )

    def state(self) -> str:
        """For people: how it is kept now."""
        sources = [x for r in self.sources if (x := r()) is not None]
        is_whole = len(sources) == len(self.sources)
        is_stale = is_whole and self.stamps is not None and not self.is_fresh(sources)
        return "stale: the next call makes it anew" if is_stale else self.kind


class Constants:
    """All constants of one derivation.

    Args:
        derivation: what computes them.
        rehome: whether a parameter may move into its padded buffer.
        device: where they lie, of a derivation that has no sources.
    """

    def __init__(
        self, derivation: Derivation, rehome: bool = True, device: torch.device | None = None
    ) -> None:
        self.derivation, self.rehome = derivation, rehome
        self.device = device or torch.device("cpu")
        self.refreshes = 0  # computations so far, the first of each constant included
        self._constants: dict[tuple[int, ...], Constant] = {}

    def __len__(self) -> int:
        return len(self._constants)

    def of(self, sources: Sequence[Tensor]) -> Constant:
        """The constant of these parameters, fresh."""
        with _LOCK:
            key = tuple(map(id, sources))
            constant = self._constants.get(key)
            if constant is None or any(
                r() is not x for r, x in zip(constant.sources, sources, strict=True)
            ):
                table = weakref.ref(self)  # no cycle: a table is freed with its last graph

                def forget(_: object) -> None:
                    if (found := table()) is not None:
                        found._forget(key)

                constant = Constant(tuple(weakref.ref(x, forget) for x in sources))
                if all(map(is_watchable, sources)):
                    self._constants[key] = constant
            if not constant.is_fresh(sources):
                self._refresh(constant, sources)
            return constant

    def invalidate(self, source: Tensor) -> list[Constant]:
        """Mark the constants of this parameter as stale, and return them."""
        with _LOCK:
            found = [c for key, c in list(self._constants.items()) if id(source) in key]
            for constant in found:
                for stamp in constant.stamps or ():
                    if stamp.version is not None:
                        stamp.expire()
            return found

    def _refresh(self, constant: Constant, sources: Sequence[Tensor]) -> None:
        with moving(sources[0].device if sources else self.device):
            if not all(map(is_watchable, sources)):
                constant.value, constant.stamps = self.derivation(*sources), None
                constant.kind = "computed on each call: an inference tensor has no version counter"
                return
            self.refreshes += 1
            buffer, reason = self._home(sources)
            # Read before the data: a write in between makes the next call compute again.
            stamps = [Stamp(x, is_home=buffer is not None) for x in sources]
            if buffer is not None:
                constant.value, constant.kind = buffer, "re-homed: the parameter lives in it"
            else:
                value = self.derivation(*sources)
                if any(_same_storage(value, x) for x in sources):
                    stamps = [Stamp(x, is_home=True) for x in sources]
                    constant.value, constant.kind = value, "the parameter itself: it fits"
                else:
                    self._copy(constant, value)
                    constant.kind = f"a copy: {reason}"
        constant.stamps = stamps  # last, when the work is done: others may look without the lock

    def _home(self, sources: Sequence[Tensor]) -> tuple[Tensor | None, str]:
        how = self.derivation
        if not isinstance(how, Padding):
            return None, "it is computed"
        p = sources[0]
        found = homes.find(p, how)
        if found is not None:
            return found, ""
        if not how.keeps_as_prefix(p):
            return None, "more than rows is added (compile_ext.prepare moves the parameter)"
        reason = homes.why_not(p) if self.rehome else "compile_ext.rehome is False"
        return (homes.move(p, how), "") if reason is None else (None, reason)

    def _copy(self, constant: Constant, value: Tensor) -> None:
        old = constant.value
        # A buffer that the parameter has left stays what those who hold a part of it see.
        if old is not None and homes.can_hold(old, value):
            old.copy_(value)
        else:
            constant.value = value

    def drop(self, constant: Constant) -> None:
        """Let go of a constant that no graph will ask for again."""
        with _LOCK:
            for key in [k for k, c in self._constants.items() if c is constant]:
                self._constants.pop(key)

    def _forget(self, key: tuple[int, ...]) -> None:
        constant = self._constants.get(key)
        if constant is not None and any(r() is None for r in constant.sources):
            self._constants.pop(key, None)  # else: newer tensors with the same ids


def is_watchable(source: Tensor) -> bool:
    """Whether an update of this tensor can be seen."""
    return not isinstance(source, FakeTensor) and not source.is_inference()


def _same_storage(x: Tensor, y: Tensor) -> bool:
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


@contextmanager
def moving(device: torch.device) -> Iterator[None]:
    """Constants and parameters are written or moved inside: by one thread, while nothing else runs
    on the device, and finished when it ends. Outside inference mode: a tensor made inside it could
    not be refreshed outside."""
    is_cuda = device.type == "cuda"
    # Without the modes around the call: under a FakeTensorMode a real parameter would become fake.
    plain = torch.inference_mode(False), torch.no_grad(), _disable_current_modes()
    with _LOCK, plain[0], plain[1], plain[2]:
        if is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    "a compiled call inside torch.cuda.graph",
                    "a weight that was updated, or is used for the first time",
                    "derived constants that are fresh: what is computed here would be part of the"
                    " captured graph",
                    "call the compiled model once, or compile_ext.refresh(model), before capture",
                )
            torch.cuda.synchronize(device)
        yield
        if is_cuda:
            torch.cuda.current_stream(device).synchronize()


# A graph is compiled for one form of its parameters, so each form has its table.
_Key = tuple[Derivation, bool, torch.dtype, torch.device | None, tuple[Any, ...]]
_SHARED: weakref.WeakValueDictionary[_Key, Constants] = weakref.WeakValueDictionary()


def constants(
    derivation: Derivation,
    sources: Sequence[Tensor],
    rehome: bool = True,
    device: torch.device | None = None,
) -> Constants:
    """The constants of a derivation for parameters of the form of ``sources`` (dtype, shape,
    strides): shared by all graphs that use it, and freed with the last of them. ``device``: where
    the one lies that has no sources.
    """
    forms = tuple((x.dtype, tuple(x.shape), x.stride()) for x in sources)
    key = derivation, rehome, torch.get_default_dtype(), None if sources else device, forms
    found = _SHARED.get(key)
    if found is None:
        _watch_optimizers()
        found = _SHARED[key] = Constants(derivation, rehome, device)
    return found


def refresh(sources: Iterable[Tensor]) -> int:
    """Compute the constants of these parameters anew; how many there were."""
    found = {
        id(constant): (table, constant)
        for source in sources
        for table in list(_SHARED.values())
        for constant in table.invalidate(source)
    }
    for table, constant in found.values():
        alive = [x for r in constant.sources if (x := r()) is not None]
        if len(alive) == len(constant.sources):
            table.of(alive)
    return len(found)


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
