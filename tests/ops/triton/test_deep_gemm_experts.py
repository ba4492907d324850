"""DeepGEMM behind the ops of a mixture of experts, against the references. Stand-ins take the place
of the library: they assert what it asserts, and do what its kernels do with rows that no promise
covers.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_ext.ops import (
    block_scaled_mm,
    fp8_bmm,
    fp8_bmm_deep_gemm,
    grouped_block_scaled_mm,
    grouped_block_scaled_mm_deep_gemm,
    grouped_block_scaled_mm_masked,
    grouped_block_scaled_mm_masked_deep_gemm,
)

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
N, K = 192, 256
Pair = tuple[Tensor, Tensor]


def column_strides(scale: Tensor) -> tuple[int, ...]:
    m, groups = scale.shape[-2:]
    column = -(-m // 4) * 4
    return (groups * column, 1, column)[-scale.dim() :]


def assert_operands(a: Pair, b: Pair, out: Tensor) -> None:
    """What every kernel of the library wants on SM90, where a is ``[..., m, k]``."""
    (x, scale_a), (w, scale_b) = a, b
    *groups, n, k = w.shape
    assert x.dtype == w.dtype == FP8
    assert x.stride(-1) == w.stride(-1) == 1
    assert n % 64 == 0
    assert k % 128 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.shape == (*x.shape[:-1], k // 128)
    assert scale_a.stride() == column_strides(scale_a)
    assert scale_a.data_ptr() % 16 == 0
    rows, columns = -(-n // 128), k // 128
    assert scale_b.shape == (*groups, rows, columns)
    assert scale_b.stride() == (rows * columns, columns, 1)
    assert out.dtype == BF16
    assert out.stride(-1) == 1


def contiguous(a: Pair, b: Pair, out: Tensor, m_indices: Tensor) -> None:
    """``m_grouped_fp8_gemm_nt_contiguous``: the group of the first of 128 rows, unless the first of
    64 has none; no index is checked."""
    assert_operands(a, b, out)
    (x, scale_a), (w, scale_b) = a, b
    m = x.shape[0]
    assert w.stride(0) == w.shape[1] * w.stride(1)
    assert m_indices.dtype == torch.int32
    assert m_indices.is_contiguous()
    assert m_indices.shape == (m,)
    blocks = -(-m // 128)
    index = m_indices.as_strided((blocks * 128,), (1,)).tolist()  # raises beyond the memory
    out.fill_(float("nan"))
    for start in range(0, blocks * 128, 64):
        rows = slice(start, min(start + 64, m))
        if start >= m:
            break
        group = max(0, index[start // 128 * 128])
        assert group < w.shape[0], "an illegal address"
        product = block_scaled_mm(x[rows], w[group], scale_a[rows], scale_b[group])
        out[rows] = product if index[start] >= 0 else 0


def masked(a: Pair, b: Pair, out: Tensor, masked_m: Tensor, expected_m: int) -> None:
    """``fp8_m_grouped_gemm_nt_masked``: tiles of 128 rows are stored whole, those of the last group
    first, so that what is stored beyond a group shows."""
    assert_operands(a, b, out)
    (x, scale_a), (w, scale_b) = a, b
    g, m_max, _ = x.shape
    assert x.stride(0) == m_max * x.stride(1)
    assert w.stride(0) == w.shape[1] * w.stride(1)
    assert masked_m.dtype == torch.int32
    assert masked_m.is_contiguous()
    assert masked_m.shape == (g,)
    assert type(expected_m) is int
    assert 1 <= expected_m <= m_max
    flat = out.view(g * m_max, -1)
    flat.fill_(float("nan"))
    rows, scales = x.reshape(g * m_max, -1), scale_a.reshape(g * m_max, -1)
    for group, used in enumerate(masked_m.tolist()):
        assert 0 <= used <= m_max, "an illegal address"
        tile = slice(group * m_max, group * m_max + -(-used // 128) * 128)
        flat[tile] = block_scaled_mm(rows[tile], w[group], scales[tile], scale_b[group])


def einsum(expression: str, a: Pair, b: Pair, out: Tensor) -> None:
    """``fp8_einsum``: heads are the batch, and the scales lie as those of a batch."""
    assert expression == "bhr,hdr->bhd"
    (x, scale_a), (w, scale_b) = a, b
    assert_operands((x.transpose(0, 1), scale_a.transpose(0, 1)), b, out.transpose(0, 1))
    op = torch.ops.compile_ext.fp8_bmm  # not through this very stand-in
    out.copy_(op(x, w, scale_a, scale_b, out.dtype, pinned="reference"))


@pytest.fixture
def library(deep_gemm: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    functions: dict[str, Any] = {
        "m_grouped_fp8_gemm_nt_contiguous": contiguous,
        "fp8_m_grouped_gemm_nt_masked": masked,
        "fp8_einsum": einsum,
        "get_mk_alignment_for_contiguous_layout": lambda: 128,
    }
    for name, function in functions.items():
        deep_gemm.setattr(sys.modules["deep_gemm"], name, function, raising=False)
    return deep_gemm


def fp8(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(FP8)


def scales(*shape: int, device: str) -> Tensor:
    return torch.rand(shape, device=device) + 0.5


def weight(g: int, device: str) -> Pair:
    return fp8(g, N, K, device=device), scales(g, 2, K // 128, device=device)


@pytest.mark.parametrize("m", [128, 300, 512])
def test_contiguous_equals_the_reference(m: int, library: pytest.MonkeyPatch, device: str) -> None:
    """Idle rows in front of their block, inside, behind, a block of them, and indices that are no
    group; some of them hold NaN."""
    index = torch.full((512,), 2)
    index[:7], index[70:75], index[127] = -1, -9, 3
    index[128:256], index[192:256] = 0, -1
    index[256:384] = 1_000_000
    index[384:] = 1
    index = index[:m].int().to(device)
    a, scale_a = fp8(m, K, device=device), scales(m, K // 128, device=device)
    a[:3] = a[70] = float("nan")
    b, scale_b = weight(3, device)
    got = grouped_block_scaled_mm_deep_gemm.run(a, b, scale_a, scale_b, index, BF16)
    want = grouped_block_scaled_mm(a, b, scale_a, scale_b, index)
    idle = (index < 0) | (index >= 3)
    assert int(idle.sum()) >= 13
    assert bool((got[idle] == 0).all())
    assert torch.equal(got, want)


def test_contiguous_takes_indices_that_are_a_view(library: pytest.MonkeyPatch, device: str) -> None:
    index = torch.zeros(256, 2, dtype=torch.int32, device=device)
    index[::2, 1], index[1::2, 1] = 1, -1  # not to be read
    a, scale_a = fp8(256, K, device=device), scales(256, 2, device=device)
    args = a, *weight(2, device)[:1], scale_a, scales(2, 2, 2, device=device)
    got = grouped_block_scaled_mm_deep_gemm.run(*args, index[:, 0], BF16)
    assert torch.equal(got, grouped_block_scaled_mm(*args, index[:, 0]))


@pytest.mark.parametrize("expected_m", [1, 100, 4096])
def test_masked_equals_the_reference(
    expected_m: int, library: pytest.MonkeyPatch, device: str
) -> None:
    used = torch.tensor([128, 0, 3, 999, -4], dtype=torch.int32, device=device)
    a, scale_a = fp8(5, 128, K, device=device), scales(5, 128, 2, device=device)
    b, scale_b = weight(5, device)
    args = a, b, scale_a, scale_b, used
    got = grouped_block_scaled_mm_masked_deep_gemm.run(*args, expected_m, BF16)
    want = grouped_block_scaled_mm_masked(*args, expected_m)
    for group, rows in enumerate([128, 0, 3, 128, 0]):
        assert torch.equal(got[group, :rows], want[group, :rows])


@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_bmm_equals_the_reference(tokens: int, library: pytest.MonkeyPatch, device: str) -> None:
    a, scale_a = fp8(tokens, 3, K, device=device), scales(tokens, 3, 2, device=device)
    b, scale_b = weight(3, device)
    got = fp8_bmm_deep_gemm.run(a, b, scale_a, scale_b, BF16)
    assert torch.equal(got, fp8_bmm(a, b, scale_a, scale_b))
    assert got.is_contiguous()


def test_scales_that_lie_right_are_handed_on(library: pytest.MonkeyPatch, device: str) -> None:
    taken: list[Tensor] = []
    name = "fp8_m_grouped_gemm_nt_masked"
    library.setattr(sys.modules["deep_gemm"], name, lambda a, *rest: taken.append(a[1]))
    scale = torch.empty_strided((2, 128, 2), (256, 1, 128), device=device).fill_(1)
    used = torch.ones(2, dtype=torch.int32, device=device)
    args = (
        fp8(2, 128, K, device=device),
        weight(2, device)[0],
        scale,
        scales(2, 2, 2, device=device),
    )
    grouped_block_scaled_mm_masked_deep_gemm.run(*args, used, 1, BF16)
    assert taken[0].data_ptr() == scale.data_ptr()


def hopper(library: pytest.MonkeyPatch) -> FakeTensorMode:
    library.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return FakeTensorMode()


def empty(*shape: int, gap: int = 0, extra: int = 0) -> Tensor:
    """FP8 rows of which ``gap`` are left out behind a group, and ``extra`` elements of each."""
    row = shape[-1] + extra
    strides = ((shape[-2] + gap) * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=FP8, device="cuda")


def operands(rows: tuple[int, ...], g: int, **given: int) -> Any:
    n, k, up = given.get("n", N), given.get("k", K), 127
    a = empty(*rows, k, gap=given.get("a_gap", 0), extra=given.get("extra", 0))
    scale_a = torch.empty(*rows, (k + up) // 128, device="cuda")
    scale_b = torch.empty(g, (n + up) // 128, (k + up) // 128, device="cuda")
    return a, empty(g, n, k, gap=given.get("gap", 0)), scale_a, scale_b


MULTIPLES = "needs N in multiples of 64 and K in multiples of 128, found N={}, K={}"
APART = "needs the groups of {} one behind the other, at a distance of their rows"


def test_reasons_of_contiguous(library: pytest.MonkeyPatch) -> None:
    mode = hopper(library)

    def why(m: int = 300, g: int = 3, out: Any = BF16, **given: int) -> str | None:
        with mode:
            a, b, scale_a, scale_b = operands((m,), g, **given)
            indices = torch.empty(m, dtype=torch.int32, device="cuda")
        return grouped_block_scaled_mm_deep_gemm.why_not(a, b, scale_a, scale_b, indices, out)

    assert why() is None
    assert why(n=96) == MULTIPLES.format(96, K)
    assert why(k=200) == MULTIPLES.format(N, 200)
    assert why(out=torch.float32) == "gives bfloat16 only, wanted torch.float32"
    assert why(m=0) == why(g=0) == "the product is empty"
    assert why(gap=64) == APART.format("b")
    name = "get_mk_alignment_for_contiguous_layout"
    library.setattr(sys.modules["deep_gemm"], name, lambda: 64)
    assert why() is None
    library.setattr(sys.modules["deep_gemm"], name, lambda: 256)
    assert "reads one group for 256 rows" in str(why())
    library.setattr(sys.modules["compile_ext.ops.triton_support"], "is_installed", lambda: False)
    assert "Triton is not installed" in str(why())
    library.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    assert why() == "needs compute capability 9.0, the device has 8.9"


def test_reasons_of_masked(library: pytest.MonkeyPatch) -> None:
    mode = hopper(library)

    def why(m: int = 128, **given: int) -> str | None:
        with mode:
            a, b, scale_a, scale_b = operands((3, m), 3, **given)
            used = torch.empty(3, dtype=torch.int32, device="cuda")
        return grouped_block_scaled_mm_masked_deep_gemm.why_not(
            a, b, scale_a, scale_b, used, 1, BF16
        )

    assert why() is None
    assert why(m=64) == "needs m_max in multiples of 128, found 64"
    assert why(a_gap=128) == APART.format("a")
    assert why(gap=64) == APART.format("b")
    assert why(n=96) == MULTIPLES.format(96, K)


def test_reasons_of_bmm(library: pytest.MonkeyPatch) -> None:
    mode = hopper(library)

    def why(**given: int) -> str | None:
        with mode:
            a, b, scale_a, scale_b = operands((5, 3), 3, **given)
        return fp8_bmm_deep_gemm.why_not(a, b, scale_a, scale_b, BF16)

    assert why() is None
    assert why(gap=64) is None  # a batch has a stride of its own
    assert why(extra=8) == "needs row strides in multiples of 16 bytes, a has 792"
    assert why(n=96) == MULTIPLES.format(96, K)
