"""Load and launch compiled CUDA kernels through the driver, which torch has loaded already.

ctypes and not the compiler's own runtime: a process that finds its kernels on disk imports neither
the compiler (CuTe DSL 4.8: 0.75 s after torch) nor its library of 43 MB, and needs no linker.
Structures as in cuda.h of CUDA 12.4, which has all functions used here, to 13.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from compile_ext.ops.errors import CudaError, KernelUnavailable

_DRIVER = "libcuda.so.1"
_FUNCTIONS = (
    "cuLibraryLoadData",
    "cuLibraryGetKernelCount",
    "cuLibraryEnumerateKernels",
    "cuKernelGetParamInfo",
    "cuKernelGetFunction",
    "cuFuncLoad",
    "cuLaunchKernelEx",
    "cuThreadExchangeStreamCaptureMode",
)
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_INVALID_CONTEXT = 201
# What the driver says of a kernel that it cannot run here, and not of a device in trouble.
_UNAVAILABLE = (
    1,  # INVALID_VALUE: block or cluster are not those that it was compiled for
    200,  # INVALID_IMAGE
    209,  # NO_BINARY_FOR_GPU
    222,  # UNSUPPORTED_PTX_VERSION
    300,  # INVALID_SOURCE
    500,  # NOT_FOUND
    701,  # LAUNCH_OUT_OF_RESOURCES
    801,  # NOT_SUPPORTED
    912,  # INVALID_CLUSTER_SIZE
)
_CONFIG = struct.Struct("7IPPI")  # CUlaunchConfig: grid, block, shared memory, stream, attributes
_ATTRIBUTE = struct.Struct("i4x3I52x")  # CUlaunchAttribute: id, value


class CudaKernel:
    """The one kernel of a cubin, on any device of its architecture. Threads may share it.

    Args:
        image: the cubin.
        layout: a letter of ``struct`` a parameter: P pointer, i int32, q int64, f float32.
        block: threads of a CTA.
        cluster: CTAs of a cluster.

    Raises:
        KernelUnavailable: the driver does not load it, or its parameters are others.
    """

    def __init__(self, image: bytes, layout: str, block: int, cluster: int) -> None:
        self._driver = driver()
        self._kernel = _load(self._driver, image)
        self._layout, self._block = layout, block
        self._functions: dict[int, int] = {}
        self._memory = _Memory(layout, cluster)
        self._check_layout()

    def launch(self, index: int, grid: int, arguments: Sequence[Any], *, pdl: bool) -> None:
        """Launch ``grid`` CTAs on torch's current stream of CUDA device ``index``.

        Args:
            arguments: of ``layout``; pointers as addresses.
            pdl: with programmatic stream serialization: the kernel may start while the one in front
                still runs, up to its ``griddepcontrol.wait``.

        Raises:
            KernelUnavailable: this device cannot run it. CudaError: the driver refuses for another
                reason, an error of an earlier kernel among them.
        """
        if current_device() != index:
            with torch.cuda.device(index):  # the default stream is that of the current device
                return self._launch(index, grid, arguments, pdl)
        return self._launch(index, grid, arguments, pdl)

    def _launch(self, index: int, grid: int, arguments: Sequence[Any], pdl: bool) -> None:
        function = self._functions.get(index) or self._load_on(index)
        x = self._memory.of_thread
        x.write_parameters(x.parameters, 0, *arguments)
        stream, attributes = current_stream(index), x.count - (not pdl)
        _CONFIG.pack_into(
            x.config, 0, grid, 1, 1, self._block, 1, 1, 0, stream, x.attributes, attributes
        )
        launch = self._driver.cuLaunchKernelEx
        code = launch(x.config_at, function, x.pointers_at, None)
        if code == _INVALID_CONTEXT:  # a thread that has not used CUDA yet
            _bind(self._driver, index)
            code = launch(x.config_at, function, x.pointers_at, None)
        if code:
            _check(self._driver, code, "to launch")

    def _load_on(self, index: int) -> int:
        """The kernel's function on a device, loaded now and not at its first launch: that may be
        under the capture of a CUDA graph."""
        function = ctypes.c_void_p()
        with _capture_relaxed(self._driver):
            _bind(self._driver, index)
            code = self._driver.cuKernelGetFunction(ctypes.byref(function), self._kernel)
            _check(self._driver, code, "to load a kernel")
            _check(self._driver, self._driver.cuFuncLoad(function), "to load a kernel")
        assert function.value
        self._functions[index] = function.value
        return function.value

    def _check_layout(self) -> None:
        """Compare with what the cubin says of its parameters: wrong bytes are wrong addresses."""
        found: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        refs = ctypes.byref(offset), ctypes.byref(size)
        info = self._driver.cuKernelGetParamInfo
        while not info(self._kernel, ctypes.c_size_t(len(found)), *refs):
            found.append((offset.value, size.value))
        wanted = [(at, struct.calcsize(x)) for at, x in _offsets(self._layout)]
        if found != wanted:
            raise KernelUnavailable(
                f"its parameters lie at (offset, bytes) {found}, {self._layout!r} says {wanted}"
            )


class _Memory(threading.local):
    """Of each thread that launches the kernel; one look-up takes 0.15 us."""

    def __init__(self, layout: str, cluster: int) -> None:
        self.of_thread = _LaunchMemory(layout, cluster)


class _LaunchMemory:
    """What the driver reads in a launch, made once: addresses and not arrays, whose conversion
    takes 0.4 us each."""

    def __init__(self, layout: str, cluster: int) -> None:
        parameters = struct.Struct(layout)
        self.write_parameters = parameters.pack_into
        self.parameters = ctypes.create_string_buffer(parameters.size)
        start = ctypes.addressof(self.parameters)
        places = [start + at for at, _ in _offsets(layout)]
        self._pointers = (ctypes.c_void_p * len(places))(*places)
        self.pointers_at = ctypes.addressof(self._pointers)
        self.config = ctypes.create_string_buffer(_CONFIG.size)
        self.config_at = ctypes.addressof(self.config)
        attributes = [(_PDL, 1, 0, 0)]  # the last one, to be left out
        if cluster > 1:
            attributes.insert(0, (_CLUSTER, cluster, 1, 1))
        packed = b"".join(_ATTRIBUTE.pack(*x) for x in attributes)
        self._attributes = ctypes.create_string_buffer(packed, len(packed))
        self.attributes, self.count = ctypes.addressof(self._attributes), len(attributes)


def _offsets(layout: str) -> list[tuple[int, str]]:
    """Where each parameter lies, aligned as in C."""
    ends = [struct.calcsize(layout[: i + 1]) for i in range(len(layout))]
    return [(end - struct.calcsize(x), x) for end, x in zip(ends, layout, strict=True)]


@functools.cache
def driver() -> Any:
    """The CUDA driver.

    Raises:
        KernelUnavailable: there is none, or it is older than CUDA 12.4.
    """
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise KernelUnavailable(f"the CUDA driver does not load ({error})") from error
    for name in _FUNCTIONS:
        if not hasattr(library, name):
            raise KernelUnavailable(f"the CUDA driver is older than 12.4: it has no {name}")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


def current_stream(index: int) -> int:
    """torch's current stream of a device, as the driver knows it; Inductor's code asks so too."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


def current_device() -> int:
    index: int = torch._C._cuda_getDevice()
    return index


def _load(library: Any, image: bytes) -> ctypes.c_void_p:
    """The only kernel of a cubin. It stays loaded as long as the process: graphs may hold it."""
    loaded, kernel, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint()
    with _capture_relaxed(library):
        no_options = (None, None, 0, None, None, 0)
        code = library.cuLibraryLoadData(ctypes.byref(loaded), image, *no_options)
        _check(library, code, "to load a kernel")
        code = library.cuLibraryGetKernelCount(ctypes.byref(count), loaded)
        _check(library, code, "to load a kernel")
        if count.value != 1:
            raise KernelUnavailable(f"its cubin has {count.value} kernels, wanted 1")
        code = library.cuLibraryEnumerateKernels(ctypes.byref(kernel), 1, loaded)
        _check(library, code, "to load a kernel")
    return kernel


@contextmanager
def _capture_relaxed(library: Any) -> Iterator[None]:
    """Allow this thread what is not allowed while a CUDA graph is captured: to load code, which
    belongs to no stream."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    exchange = library.cuThreadExchangeStreamCaptureMode
    _check(library, exchange(ctypes.byref(mode)), "to change the capture mode")
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _bind(library: Any, index: int) -> None:
    """Make the device's primary context, torch's, that of this thread."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    doing = "to enter a device's context"
    _check(library, library.cuDeviceGet(ctypes.byref(device), index), doing)
    _check(library, library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), doing)
    _check(library, library.cuCtxSetCurrent(context), doing)


def _check(library: Any, code: int, doing: str) -> None:
    if not code:
        return
    said = " ".join(_text(library, get, code) for get in ("cuGetErrorName", "cuGetErrorString"))
    if code in _UNAVAILABLE:
        raise KernelUnavailable(f"the CUDA driver refuses {doing} ({said})")
    raise CudaError(
        "the CUDA driver",
        f"{said}, asked {doing}",
        "no error, of this call or of a kernel before it",
        "run with CUDA_LAUNCH_BLOCKING=1 to see which kernel fails",
    )


def _text(library: Any, function: str, code: int) -> str:
    text = ctypes.c_char_p()
    getattr(library, function)(code, ctypes.byref(text))
    return (text.value or b"error %d" % code).decode()
