"""Options: what is valid, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from compile_ext.ops.errors import OptionError
from compile_ext.options import Options
from compile_ext.passes import PASS_NAMES


def test_defaults() -> None:
    assert Options.parse() == Options(
        disable=frozenset(),
        check=False,
        inner="inductor",
        memory_budget=None,
        pdl=True,
        poison=False,
        rehome=True,
        batch_invariant=False,
        bf16_router=False,
        kernels={},
        inductor={},
    )


def test_own_and_inductor_options_side_by_side() -> None:
    got = Options.parse(options={"compile_ext.disable": ["specialize_m1"], "max_autotune": True})
    assert got.disable == frozenset({"specialize_m1"})
    assert got.inductor == {"max_autotune": True}


@pytest.mark.parametrize(
    "given",
    [{"mode": "reduce-overhead"}, {"options": {"compile_ext.mode": "reduce-overhead"}}],
    ids=str,
)
def test_mode_becomes_inductors_options(given: dict[str, Any]) -> None:
    assert Options.parse(**given).inductor == {"triton.cudagraphs": True}


def test_options_win_over_the_mode() -> None:
    got = Options.parse(options={"compile_ext.mode": "max-autotune", "triton.cudagraphs": False})
    assert got.inductor["max_autotune"] is True
    assert got.inductor["triton.cudagraphs"] is False


def test_batch_invariant_names_the_kernel_of_each_op_that_has_it() -> None:
    kernels = {"rms_norm_quantize_fp8": "reference", "scaled_mm": "batch_invariant"}
    got = Options.parse(
        options={"compile_ext.batch_invariant": True, "compile_ext.kernels": kernels}
    )
    gemms = ["block_scaled_mm", "block_scaled_mm_m1", "fp8_bmm", "grouped_block_scaled_mm"]
    gemms += ["grouped_block_scaled_mm_masked", "router_gemm", "router_gemm_m1", "scaled_mm"]
    assert got.kernels == {
        "rms_norm_quantize_fp8": "reference",
        **dict.fromkeys(gemms, "batch_invariant"),
    }


def test_no_pdl_holds_for_inductor_as_well() -> None:
    got = Options.parse(options={"compile_ext.pdl": False})
    assert got.inductor == {"triton.enable_pdl": False}
    assert got.why_no_pdl() == "compile_ext.pdl is False"
    eager = Options.parse(options={"compile_ext.pdl": False, "compile_ext.inner": "eager"})
    assert eager.inductor == {}
    assert eager.why_no_pdl() == "compile_ext.pdl is False"


def test_inductors_pdl_rules_ours_out() -> None:
    reason = "triton.enable_pdl: kernels that Inductor launches early may not wait"
    assert Options.parse().why_no_pdl() is None
    assert Options.parse(options={"triton.enable_pdl": True}).why_no_pdl() == reason
    with inductor_config.patch({"triton.enable_pdl": True}):
        assert Options.parse().why_no_pdl() == reason
        assert Options.parse(options={"triton.enable_pdl": False}).why_no_pdl() is None
        assert Options.parse(options={"compile_ext.inner": "eager"}).why_no_pdl() is None


def test_environment_adds_to_disable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_EXT_DISABLE", "specialize_m1, lower_router_linear")
    got = Options.parse(options={"compile_ext.disable": ["fold_weight_padding"]})
    assert got.disable == {"specialize_m1", "lower_router_linear", "fold_weight_padding"}


REFUSED = {
    "own option": (
        {"compile_ext.chek": True},
        ["'compile_ext.chek'", "compile_ext.check", "did you mean"],
    ),
    "pass": ({"compile_ext.disable": ["fold_padding"]}, ["'fold_padding'", *PASS_NAMES]),
    "disable as text": (
        {"compile_ext.disable": "specialize_m1"},
        ["compile_ext.disable", "a list"],
    ),
    "kernels as text": ({"compile_ext.kernels": "triton"}, ["compile_ext.kernels", "a dict"]),
    "kernels of no op": ({"compile_ext.kernels": {"scaled_m": "aten"}}, ["did you mean scaled_mm"]),
    "kernels of another op": (
        {"compile_ext.kernels": {"scaled_mm": "deep_gemm"}},
        ["kernel of scaled_mm", "'deep_gemm'", "one of aten, triton, reference, batch_invariant"],
    ),
    "kernels beside batch_invariant": (
        {"compile_ext.batch_invariant": True, "compile_ext.kernels": {"scaled_mm": "triton"}},
        ["compile_ext.kernels", "for scaled_mm one of the two", "leave 'scaled_mm' out"],
    ),
    "pdl as text": ({"compile_ext.pdl": "no"}, ["compile_ext.pdl", "True or False"]),
    "pdl of Inductor beside none": (
        {"compile_ext.pdl": False, "triton.enable_pdl": True},
        ["triton.enable_pdl = True", "False with compile_ext.pdl = False", "leave one out"],
    ),
    "bf16_router as text": ({"compile_ext.bf16_router": "yes"}, ["True or False"]),
    "batch_invariant as text": ({"compile_ext.batch_invariant": "yes"}, ["True or False"]),
    "check as number": ({"compile_ext.check": 1}, ["compile_ext.check", "True or False"]),
    "inner": ({"compile_ext.inner": "nvfuser"}, ["'nvfuser'", "inductor, aot_eager, eager"]),
    "mode": ({"compile_ext.mode": "fast"}, ["'fast'", "max-autotune"]),
    "inductor option": (
        {"max_autotun": True},
        ["'max_autotun'", "max_autotune", "torch._inductor.config"],
    ),
    "inductor type": ({"max_autotune": "yes"}, ["max_autotune", "bool"]),
    "inductor option without inductor": (
        {"compile_ext.inner": "eager", "max_autotune": True},
        ["max_autotune", "inner='inductor'"],
    ),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_with_what_would_be_right(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OptionError) as error:
        Options.parse(options=options)
    for word in words:
        assert word in str(error.value)


def test_the_user_of_torch_compile_sees_the_message() -> None:
    compiled = torch.compile(
        lambda x: x + 1, backend="compile_ext", options={"compile_ext.chek": True}
    )
    with pytest.raises(Exception, match=r"unknown option 'compile_ext\.chek'.*compile_ext\.check"):
        compiled(torch.ones(2))


def test_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_EXT_DISABLE", "everything")
    with pytest.raises(OptionError, match="COMPILE_EXT_DISABLE"):
        Options.parse()
