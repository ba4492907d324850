"""A CUDA driver that needs no GPU, for the tests of what loads and launches kernels."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_ext.ops import cache_folder, cuda_launch

SOURCE = Path(__file__).with_name("fake_cuda.cpp")


class Launch(ctypes.Structure):
    """What the driver got in its last launch."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("attrs", ctypes.c_uint),
        ("cluster", ctypes.c_uint * 3),
        ("pdl", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("params", ctypes.c_ubyte * 128),
    ]


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # No skip: ``make`` sees to Triton, whose wheel brings cuda.h, and to a C++ compiler.
    include = Path(str(import_module("triton").__file__)).parent / "backends/nvidia/include"
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = [
        os.environ.get("CXX", "g++"),
        "-shared",
        "-fPIC",
        "-I",
        str(include),
        "-o",
        str(library),
        str(SOURCE),
    ]
    subprocess.run(command, check=True)
    return library


class Driver:
    """The fake driver, and torch's idea of the current device and stream."""

    def __init__(self, library: Path) -> None:
        self.calls = ctypes.CDLL(str(library))
        self.calls.fake_last.restype = ctypes.POINTER(Launch)
        self.device = 0
        self.entered: list[int] = []

    @property
    def last(self) -> Launch:
        found: Launch = self.calls.fake_last().contents
        return found

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        self.entered.append(index)
        yield
        self.device = before


@pytest.fixture
def driver(fake_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    # Under another name it is another library, with state of its own.
    copy = tmp_path / "libcuda.so.1"
    shutil.copy(fake_library, copy)
    fake = Driver(copy)
    monkeypatch.setattr(cuda_launch, "_DRIVER", str(copy))
    monkeypatch.setattr(cuda_launch, "current_device", lambda: fake.device)
    monkeypatch.setattr(cuda_launch, "current_stream", lambda index: 0x500 + index)
    monkeypatch.setattr(torch.cuda, "device", fake.on)
    cuda_launch.driver.cache_clear()
    yield fake
    cuda_launch.driver.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of compiled kernels, empty."""
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def image(*sizes: int, kernels: int = 1, error: int = 0) -> bytes:
    """A cubin of the fake driver, whose kernel has parameters of these sizes."""
    return f"{','.join(map(str, sizes))} {kernels} {error}".encode()


@pytest.fixture
def make_image() -> Any:
    return image
