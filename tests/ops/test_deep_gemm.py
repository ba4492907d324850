"""DeepGEMM behind ``block_scaled_mm``: why it cannot run, each time with what to do, and what it is
handed where it can. A stand-in takes the place of the library, and its arguments' contract.
"""

from __future__ import annotations

import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_ext.ops import block_scaled_mm, block_scaled_mm_deep_gemm, deep_gemm_support, tma_rows
from compile_ext.ops.quantize import quantize_fp8_blocks, quantize_fp8_groups

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
run = block_scaled_mm_deep_gemm.run


def fp8_gemm_nt(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor) -> None:
    """The contract of the library on SM90, and its result."""
    (x, scale_a), (w, scale_b) = a, b
    m = scale_a.shape[0]
    assert x.dtype == w.dtype == FP8
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.stride() == (1, -(-m // 4) * 4)
    assert scale_b.is_contiguous()
    assert out.dtype == BF16
    assert out.is_contiguous()
    out.copy_(block_scaled_mm(x, w, scale_a, scale_b))


@pytest.fixture
def library(deep_gemm: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    deep_gemm.setattr(sys.modules["deep_gemm"], "fp8_gemm_nt", fp8_gemm_nt, raising=False)
    return deep_gemm


def operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, scale_a = quantize_fp8_groups(torch.randn(m, k))
    b, scale_b = quantize_fp8_blocks(torch.randn(n, k))
    return a, b, scale_a, scale_b


@pytest.mark.parametrize("m", [1, 4, 5])
@pytest.mark.parametrize("scales", ["column-major", "rows", "strided", "far"])
def test_hands_over_what_the_library_wants(
    library: pytest.MonkeyPatch, m: int, scales: str
) -> None:
    a, b, scale_a, scale_b = operands(m, 192, 384)
    want = block_scaled_mm(a, b, scale_a, scale_b)
    if scales == "rows":
        scale_a = scale_a.contiguous()
    elif scales == "strided":
        scale_a = scale_a.repeat_interleave(2, dim=1)[:, ::2]
    elif scales == "far":  # columns, at a distance that TMA takes and the library does not
        scale_a = torch.empty_strided(scale_a.shape, (1, 16)).copy_(scale_a)
    assert torch.equal(run(a, b, scale_a, scale_b, None, BF16), want)


def test_aligned_scales_are_handed_on(library: pytest.MonkeyPatch) -> None:
    a, b, scale_a, scale_b = operands(5, 64, 256)
    taken: list[Tensor] = []
    library.setattr(sys.modules["deep_gemm"], "fp8_gemm_nt", lambda a, b, out: taken.append(a[1]))
    run(a, b, scale_a, scale_b, None, BF16)
    assert taken[0].data_ptr() == scale_a.data_ptr()


def test_scales_at_an_odd_address_are_copied(library: pytest.MonkeyPatch) -> None:
    a, b, scale_a, scale_b = operands(8, 64, 256)
    taken: list[Tensor] = []
    library.setattr(sys.modules["deep_gemm"], "fp8_gemm_nt", lambda a, b, out: taken.append(a[1]))
    run(a[1:], b, scale_a[1:], scale_b, None, BF16)
    assert taken[0].data_ptr() % 16 == 0
    assert torch.equal(taken[0], scale_a[1:])


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (lambda x: x[:, 1:129], "needs an address in multiples of 16 bytes, a is a view"),
        (lambda x: x[:1, :128].expand(4, 128), "rows that do not overlap, a has a row stride of 0"),
        (lambda x: x.view(-1)[:516].view(4, 129)[:, :128], "multiples of 16 bytes, a has 129"),
        (lambda x: x[1:, 16:144], None),
    ],
)
def test_rows_that_cannot_be_addressed(view: Any, reason: str | None) -> None:
    found = tma_rows.why_not(a=view(torch.zeros(8, 256).to(FP8)))
    assert found == reason if reason is None else reason in str(found)


def test_runs_where_all_is_there(library: pytest.MonkeyPatch) -> None:
    assert deep_gemm_support.why_not() is None


def test_not_installed(monkeypatch: pytest.MonkeyPatch, fresh_deep_gemm: None) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    wanted = "DeepGEMM is not installed: pip install sgl-deep-gemm==0.1.5.post1"
    assert deep_gemm_support.why_not() == wanted


def test_a_torch_without_a_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    wanted = "no release is known for torch 2.12.1; there are some for 2.11, 2.13, 2.14"
    assert deep_gemm_support.install() == wanted


def test_no_compiler(library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library.delenv("CUDA_HOME")
    library.setenv("PATH", str(tmp_path))
    library.setattr("os.access", lambda path, mode: False)
    reason = deep_gemm_support.why_not()
    assert reason is not None
    assert reason.startswith("DeepGEMM compiles with nvcc, which was not found")


def test_a_cache_that_is_a_file(library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    reason = deep_gemm_support.why_not()
    assert reason is not None
    assert f"cannot write its cache ({tmp_path / 'cache'}: " in reason
    assert reason.endswith("set DG_JIT_CACHE_DIR to another folder")


def test_a_full_disk(library: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    library.setattr(shutil, "disk_usage", lambda path: usage(100, 100, 0))
    reason = deep_gemm_support.why_not()
    assert reason is not None
    assert f"finds the disk of its cache full ({tmp_path})" in reason


@pytest.mark.parametrize(
    "error",
    [
        ImportError("undefined symbol: c10::ValueError\nmore"),
        AssertionError("CUDA_HOME is None"),
        OSError("libcudart.so.13: cannot open shared object file"),
    ],
)
def test_does_not_load(library: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(name: str) -> Any:
        raise error

    library.setattr("importlib.import_module", fail)
    library.setattr(torch, "__version__", "2.13.0")
    first = str(error).splitlines()[0]
    assert deep_gemm_support.why_not() == (
        f"DeepGEMM does not load with torch 2.13.0 ({first}): pip install sgl-deep-gemm==0.1.7"
    )


def test_reasons_of_a_call(library: pytest.MonkeyPatch) -> None:
    library.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    mode = FakeTensorMode()

    def why(m: int = 5, n: int = 128, k: int = 256, **given: Any) -> str | None:
        with mode:
            a = torch.empty(m, k, dtype=given.get("a", FP8), device="cuda")
            b = torch.empty(n, k, dtype=FP8, device="cuda")
            scale_a = torch.empty(m, -(-k // 128), device="cuda")
            scale_b = torch.empty(-(-n // 128), -(-k // 128), device="cuda")
            bias = torch.empty(n, device="cuda") if given.get("bias") else None
        if given.get("padded"):
            with mode:
                scale_b = torch.empty_strided(scale_b.shape, (8, 1), device="cuda")
        return block_scaled_mm_deep_gemm.why_not(
            a, b, scale_a, scale_b, bias, given.get("out", BF16)
        )

    multiples = "needs N in multiples of 64 and K in multiples of 128, found N={}, K={}"
    assert why() is None
    assert why(n=96) == multiples.format(96, 256)
    assert why(k=192) == multiples.format(128, 192)
    assert why(k=0) == multiples.format(128, 0)
    assert why(m=0) == "the product is empty"
    assert why(bias=True) == "takes no bias"
    assert why(n=256, padded=True) == "needs scale_b contiguous"
    assert why(out=torch.float32) == "gives bfloat16 only, wanted torch.float32"
    assert "a is bfloat16" in str(why(a=BF16))
    library.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    assert why() == "needs compute capability 9.0, the device has 8.9"
