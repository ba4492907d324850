"""Kernels are loaded and launched through the driver as cuda.h says; the driver is a fake one."""

from __future__ import annotations

import struct
import threading
from typing import Any

import pytest

from compile_ext.ops import cuda_launch
from compile_ext.ops.cuda_launch import CudaKernel
from compile_ext.ops.errors import CudaError, KernelUnavailable

POINTER = 0x7F12_3456_789A


def test_a_launch_passes_shape_stream_attributes_and_parameters(
    driver: Any, make_image: Any
) -> None:
    kernel = CudaKernel(make_image(8, 8, 4, 4), "PPif", block=192, cluster=4)
    kernel.launch(0, 36, (POINTER, 0, -5, 0.25), pdl=True)
    last = driver.last
    assert (list(last.grid), list(last.block), last.shared) == ([36, 1, 1], [192, 1, 1], 0)
    assert (list(last.cluster), last.pdl, last.attrs) == ([4, 1, 1], 1, 2)
    assert last.stream == 0x500
    assert struct.unpack("<QQif", bytes(last.params)[:24]) == (POINTER, 0, -5, 0.25)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("pdl", [False, True])
def test_an_attribute_is_there_where_it_is_asked_for(
    driver: Any, make_image: Any, cluster: int, pdl: bool
) -> None:
    kernel = CudaKernel(make_image(8), "P", block=64, cluster=cluster)
    kernel.launch(0, 2, (POINTER,), pdl=not pdl)
    kernel.launch(0, 2, (POINTER,), pdl=pdl)
    last = driver.last
    assert last.attrs == (cluster > 1) + pdl
    assert (last.cluster[0], last.pdl) == (cluster if cluster > 1 else 0, pdl)


def test_an_int_behind_an_int_leaves_a_gap_in_front_of_a_pointer(
    driver: Any, make_image: Any
) -> None:
    kernel = CudaKernel(make_image(4, 8, 4, 8), "iPiq", block=32, cluster=1)
    kernel.launch(0, 1, (1, POINTER, 2, -3), pdl=False)
    assert struct.unpack("<iQiq", bytes(driver.last.params)[:24]) == (1, POINTER, 2, -3)


@pytest.mark.parametrize("layout", ["PP", "PPii", "Pii", "iPP", "PPq"])
def test_parameters_that_the_cubin_does_not_have_are_refused(
    driver: Any, make_image: Any, layout: str
) -> None:
    with pytest.raises(KernelUnavailable, match=r"\(0, 8\), \(8, 8\), \(16, 4\)"):
        CudaKernel(make_image(8, 8, 4), layout, block=32, cluster=1)


def test_a_device_that_is_not_current_is_made_so_for_the_launch(
    driver: Any, make_image: Any
) -> None:
    kernel = CudaKernel(make_image(8), "P", block=32, cluster=1)
    kernel.launch(0, 1, (POINTER,), pdl=False)
    assert driver.entered == []
    kernel.launch(1, 1, (POINTER,), pdl=False)
    assert (driver.entered, driver.device) == ([1], 0)
    assert driver.last.stream == 0x501
    assert driver.calls.fake_loads() == 1  # one library, a function for each device
    assert driver.calls.fake_contexts() == 2


def test_a_thread_without_a_context_gets_one(driver: Any, make_image: Any) -> None:
    kernel = CudaKernel(make_image(8), "P", block=32, cluster=1)
    kernel.launch(0, 1, (POINTER,), pdl=False)
    failed: list[BaseException] = []

    def other() -> None:
        try:
            kernel.launch(0, 7, (POINTER,), pdl=False)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert failed == []
    assert driver.last.grid[0] == 7
    assert driver.calls.fake_launches() == 2


def test_threads_do_not_share_the_memory_of_a_launch(driver: Any, make_image: Any) -> None:
    kernel = CudaKernel(make_image(8), "P", block=32, cluster=1)
    memory = []
    thread = threading.Thread(target=lambda: memory.append(kernel._memory.of_thread))
    thread.start()
    thread.join()
    mine = kernel._memory.of_thread
    assert mine is kernel._memory.of_thread
    for name in ("parameters", "config_at", "pointers_at", "attributes"):
        assert getattr(mine, name) is not getattr(memory[0], name)
        assert getattr(mine, name) != getattr(memory[0], name)


def test_loading_is_allowed_while_a_graph_is_captured(driver: Any, make_image: Any) -> None:
    driver.calls.fake_capture(1)
    kernel = CudaKernel(make_image(8), "P", block=32, cluster=1)
    kernel.launch(0, 1, (POINTER,), pdl=False)
    assert driver.calls.fake_launches() == 1
    assert driver.calls.fake_mode() == 0  # global again


@pytest.mark.parametrize("error", [200, 209, 300])
def test_a_cubin_that_the_driver_does_not_load_makes_way(
    driver: Any, make_image: Any, error: int
) -> None:
    with pytest.raises(KernelUnavailable, match="what the driver says"):
        CudaKernel(make_image(8, error=error), "P", block=32, cluster=1)
    assert driver.calls.fake_mode() == 0


def test_an_error_of_the_device_is_no_reason_to_take_another_kernel(
    driver: Any, make_image: Any
) -> None:
    kernel = CudaKernel(make_image(8), "P", block=32, cluster=1)
    kernel.launch(0, 1, (POINTER,), pdl=False)
    driver.calls.fake_next_error(700)  # illegal address, of a kernel before it
    with pytest.raises(CudaError) as raised:
        kernel.launch(0, 1, (POINTER,), pdl=False)
    assert "CUDA_ERROR_FAKE what the driver says" in raised.value.found
    assert "CUDA_LAUNCH_BLOCKING" in raised.value.fix
    driver.calls.fake_next_error(701)  # too many registers
    with pytest.raises(KernelUnavailable):
        kernel.launch(0, 1, (POINTER,), pdl=False)


@pytest.mark.parametrize("kernels", [0, 2])
def test_a_cubin_has_one_kernel(driver: Any, make_image: Any, kernels: int) -> None:
    with pytest.raises(KernelUnavailable, match=f"{kernels} kernels"):
        CudaKernel(make_image(8, kernels=kernels), "P", block=32, cluster=1)


def test_without_a_driver_or_with_an_old_one_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_launch, "_DRIVER", "libno_such_driver.so.1")
    cuda_launch.driver.cache_clear()
    with pytest.raises(KernelUnavailable, match="does not load"):
        cuda_launch.driver()
    monkeypatch.setattr(cuda_launch, "_DRIVER", "libc.so.6")
    with pytest.raises(KernelUnavailable, match=r"older than 12\.4: it has no cuLibraryLoadData"):
        cuda_launch.driver()
    cuda_launch.driver.cache_clear()
