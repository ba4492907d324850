"""The real checkpoint: what `compile-ext demo --model smollm2` runs."""

from __future__ import annotations

import importlib.util
import io

import pytest
import torch
from rich.console import Console

from compile_ext.demo import smollm2
from compile_ext.demo.run import progress_bar

NEEDED = [name for name in smollm2.NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(NEEDED), reason=f"not installed: {', '.join(NEEDED)}"),
]

LINEARS = [
    f"model.layers.{layer}.{name}"
    for layer in range(30)
    for name in (
        "mlp.down_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "self_attn.q_proj",
        "self_attn.v_proj",
    )
]


@pytest.fixture(scope="module")
def outcome() -> smollm2.Outcome:
    with progress_bar(Console(file=io.StringIO())) as progress:
        return smollm2.answer(progress)


def test_the_answer_makes_sense(outcome: smollm2.Outcome) -> None:
    assert outcome.text.startswith("Gravity is a fundamental concept in physics")


def test_both_compilers_equal_eager_bit_by_bit(outcome: smollm2.Outcome) -> None:
    """Eager rounds to bfloat16 after every op and so does EXACT; means are ATen's in both."""
    for way in outcome.ways[1:]:
        assert way.comparison is not None
        steps = zip(way.comparison.logits, outcome.trace.logits, strict=True)
        assert all(torch.equal(got, want) for got, want in steps), way.name
        assert [int(x.argmax()) for x in way.comparison.logits] == outcome.trace.answer
    assert outcome.same_bits


def test_every_linear_is_listed(outcome: smollm2.Outcome) -> None:
    """For the prompt of 34 tokens and for one token; 576 = 4.5 * 128 needs no padding to 16."""
    sites = [row for row in outcome.report.rows if row.site is not None]
    assert sorted(row.module for row in sites) == sorted(2 * LINEARS)
    assert {row.site.m for row in sites if row.site} == {(1, 1), (34, 34)}
    op = "compile_ext::block_scaled_mm"
    assert {(row.op, row.site.m[0]) for row in sites if row.site} == {(op, 34), (f"{op}_m1", 1)}
    fold = [d for row in sites for d in row.decisions if d.pass_name == "fold_weight_padding"]
    details = {d.detail for d in fold if d.fired}
    assert details == {"scale_b: its strides are (5, 1): fit(strides % 4)"}  # K = 576: 5 blocks


def test_one_graph_serves_all_layers(outcome: smollm2.Outcome) -> None:
    """One for the prompt and one for a single token."""
    assert outcome.report.graphs == 2
    assert outcome.report.fallbacks == ()
