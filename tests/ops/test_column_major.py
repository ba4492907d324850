"""column_major: values, strides, bad input, and that Inductor computes it with what is before."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from compile_ext.ops import (
    block_scaled_mm,
    errors,
    quantize_fp8_blocks,
    quantize_fp8_groups,
)
from compile_ext.ops.column_major import OP, register_lowering
from compile_ext.ops.quantize import quantize_groups


def column_major(scale: Tensor) -> Tensor:
    out: Tensor = OP(scale)
    return out


@pytest.mark.parametrize("m", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_values_and_strides(m: int, groups: int, opcheck: Any) -> None:
    for scale in (torch.rand(m, groups), torch.rand(groups, m).t()):
        out = column_major(scale)
        assert torch.equal(out, scale)
        assert out.stride() == (1, -(-m // 4) * 4)
        opcheck(OP, (scale,))


def test_it_is_what_quantize_fp8_groups_does() -> None:
    x = torch.randn(5, 300).bfloat16()
    q, scale = quantize_groups(x, False)
    want, want_scale = quantize_fp8_groups(x)
    got = column_major(scale)
    assert torch.equal(q.float(), want.float())
    assert torch.equal(got, want_scale)
    assert got.stride() == want_scale.stride()


BAD = [
    ("scale", torch.rand(2, 2).half(), errors.DtypeError, "scale of float16", "float32"),
    ("scale", torch.rand(2), errors.RankError, "scale of shape [2]", "2 dimensions"),
]


@pytest.mark.parametrize("bad", BAD, ids=["dtype", "rank"])
def test_refused(bad: Any, assert_refused: Any) -> None:
    assert_refused(column_major, {"scale": torch.rand(2, 2)}, bad)


def test_inductor_computes_it_without_a_call_and_without_a_guard() -> None:
    register_lowering()
    w, scale_b = quantize_fp8_blocks(torch.randn(64, 256))

    def model(x: Tensor) -> Tensor:
        q, scale = quantize_groups(x, False)
        return block_scaled_mm(q, w, column_major(scale), scale_b)

    compiled = torch.compile(model)
    rows = [torch.randn(m, 256) for m in (8, 5)]
    for x in rows:
        torch._dynamo.mark_dynamic(x, 0)
    # A cached graph would show the lowering of another run.
    with inductor_config.patch(force_disable_caches=True):
        got, codes = run_and_get_code(compiled, rows[0])
    assert torch.equal(got, model(rows[0]))
    assert torch.equal(compiled(rows[1]), model(rows[1]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    text = "".join(codes)
    assert "block_scaled_mm.default(" in text
    assert "column_major.default(" not in text
    assert re.search(r"empty_strided_cpu\(\((\w+), 2\), \(1, 4\*\(\(3 \+ \1\) // 4\)\)", text)
