"""A measured table goes before the order of an op's kernels; no GPU is needed to ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compile_ext.ops import define, device_tables
from compile_ext.ops.device_tables import Ranges
from compile_ext.ops.quantize import quantize_fp8_per_token
from compile_ext.ops.scaled_mm import OP, scaled_mm_ref

N, K = 16, 64
ROWS = {("scaled_mm", N, K): Ranges((1, 9, 65), (8, 64, 99), ("few", "slow", "gone"))}


def definition() -> define.OpDefinition:
    found = define.definition_of(OP)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """scaled_mm has "first", "slow" and "few", which takes up to 4 tokens; a table has it."""

    def why_not(a: Tensor, *_: Any) -> str | None:
        return None if a.shape[0] <= 4 else "takes up to 4 tokens"

    first, slow = (define.Kernel(x, define.never, scaled_mm_ref) for x in ("first", "slow"))
    few = define.Kernel("few", why_not, scaled_mm_ref)
    reference = define.Kernel("reference", define.never, scaled_mm_ref)
    replaced = define.OpDefinition(OP, (first, slow, few, reference), definition().gemm)
    monkeypatch.setitem(define._DEFINITIONS, OP, replaced)
    monkeypatch.setattr(device_tables, "ranges_of", lambda index: ROWS)


def call(m: Any, n: Any = N, k: Any = K, mode: FakeTensorMode | None = None) -> tuple[Any, ...]:
    with mode or FakeTensorMode():
        a, b = (torch.empty(x, k, dtype=torch.float8_e4m3fn, device="cuda") for x in (m, n))
        scales = torch.empty(m, 1, device="cuda"), torch.empty(n, 1, device="cuda")
    return a, b, *scales, None, torch.float32


def test_its_kernel_is_tried_first() -> None:
    kernel, reasons = definition().kernel_for(*call(4))
    assert kernel.name == "few"
    assert reasons == {x: "few is measured as faster" for x in ("first", "slow")}
    assert definition().kernel_for(*call(9))[0].name == "slow"


def test_the_order_follows_where_it_cannot_run_the_call() -> None:
    kernel, reasons = definition().kernel_for(*call(5))
    assert kernel.name == "first"
    assert reasons == {"few": "measured as the fastest, but takes up to 4 tokens"}


def test_a_kernel_that_the_op_lacks() -> None:
    kernel, reasons = definition().kernel_for(*call(65))
    assert kernel.name == "first"
    assert reasons == {"gone": "measured as the fastest, but the op has no such kernel"}


@pytest.mark.parametrize("shape", [(100, N, K), (4, N + 1, K), (4, N, K + 1), (0, N, K)], ids=str)
def test_the_order_holds_where_there_is_no_row(shape: tuple[int, int, int]) -> None:
    kernel, reasons = definition().kernel_for(*call(*shape))
    assert (kernel.name, reasons) == ("first", {})


def test_a_pin_wins() -> None:
    assert definition().kernel_for(*call(4), pinned="first")[0].name == "first"


def test_on_the_cpu_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tables, "ranges_of", None)  # a call raises
    a, scale_a = quantize_fp8_per_token(torch.randn(4, K))
    b, scale_b = quantize_fp8_per_token(torch.randn(N, K))
    kernel, _ = definition().kernel_for(a, b, scale_a, scale_b, None, torch.float32)
    assert kernel.name == "first"


def test_of_leading_dimensions_m_is_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    router = define.definition_of(torch.ops.compile_ext.router_gemm.default)
    assert router is not None
    rows = {("router_gemm", 8, 64): Ranges((6,), (6,), ("reference",))}
    monkeypatch.setattr(device_tables, "ranges_of", lambda index: rows)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with FakeTensorMode():
        a, b = torch.empty(2, 3, 64, device="cuda"), torch.empty(8, 64, device="cuda")
        fewer = torch.empty(2, 2, 64, device="cuda")
    assert router.kernel_for(a, b, None)[0].name == "reference"
    assert router.kernel_for(fewer, b, None)[0].name == "triton_small_m"


def test_of_an_m_known_only_at_run_time_no_table_knows_and_nothing_is_guarded() -> None:
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    m = environment.create_unbacked_symint()
    kernel, _ = definition().kernel_for(*call(m, mode=mode))
    assert kernel.name == "first"
    assert environment.guards == []
