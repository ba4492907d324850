"""Which kernel runs where M is known only at run time and a table has the shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compile_ext.ops import define, device_tables
from compile_ext.ops.device_tables import Ranges
from compile_ext.ops.scaled_mm import OP, scaled_mm_ref
from compile_ext.passes.kernels_by_m import kernels_by_m

N, K = 16, 64


def why_not_few(a: Tensor, *_: Any) -> str | None:
    return None if a.shape[0] <= 16 else "takes up to 16 tokens"


def why_not_aligned(a: Tensor, b: Tensor, scale_a: Tensor, *_: Any) -> str | None:
    """Looks at a stride that depends on M, as TMA's kernels do."""
    return None if scale_a.stride(1) % 4 == 0 else "wants columns of 16 bytes"


KERNELS = (
    define.Kernel("aligned", why_not_aligned, scaled_mm_ref),
    define.Kernel("few", why_not_few, scaled_mm_ref),
    define.Kernel("reference", define.never, scaled_mm_ref),
)


@pytest.fixture
def definition() -> define.OpDefinition:
    gemm = define._DEFINITIONS[OP].gemm
    return define.OpDefinition(OP, KERNELS, gemm)


def call(environment: ShapeEnv) -> tuple[Any, torch.SymInt]:
    """Arguments on CUDA with a dynamic M of 2 and more, and M."""
    mode = FakeTensorMode(shape_env=environment)
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    m: Any = mode.from_tensor(torch.empty(40, 1), symbolic_context=dynamic).shape[0]
    with mode:
        a, b = (torch.empty(x, K, dtype=torch.float8_e4m3fn, device="cuda") for x in (m, N))
        columns = torch.empty_strided((m, 1), (1, (m + 3) // 4 * 4), device="cuda")
        scale_b = torch.empty(N, 1, device="cuda")
    return (a, b, columns, scale_b, None, torch.bfloat16), m


CASES = {
    "none": (None, "slow"),
    "another shape": ({("scaled_mm", N, 128): Ranges((1,), (9,), ("few",))}, "slow"),
    "all of M": (((1, 17), (16, 99), ("few", "aligned")),
        "few (M 2..16), aligned (M 17..99), else slow"),
    "neighbours with one kernel": (((1, 17, 33), (16, 32, 64), ("aligned",) * 3),
        "aligned (M 2..64), else slow"),
    "a hole": (((2, 40), (16, 64), ("few", "aligned")),
        "few (M 2..16), aligned (M 40..64), else slow"),
    "a kernel that takes a part of its row": (((1,), (63,), ("few",)),
        "few or aligned (M 2..63), else slow"),
    "only M that cannot be": (((1,), (1,), ("few",)), "slow"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "wanted"), CASES.values(), ids=CASES)
def test_each_range_has_its_kernel(
    rows: Any, wanted: str, definition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {("scaled_mm", N, K): Ranges(*rows)} if isinstance(rows, tuple) else rows or {}
    monkeypatch.setattr(device_tables, "ranges_of", lambda index: table)
    environment = ShapeEnv()
    args, m = call(environment)
    before = list(environment.guards)
    assert kernels_by_m(definition, args, m, otherwise="slow") == wanted
    assert environment.guards == before
