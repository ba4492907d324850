"""compile_ext.mark_router: what it marks, what the mark survives, and what explain says of it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compile_ext
from compile_ext import records
from compile_ext.ops.errors import MarkError

OPTIONS: dict[str, Any] = {"compile_ext.inner": "eager"}
PASS = "lower_router_linear"
FIRED = (True, "logits in float32, bfloat16 for output")


class Gate(nn.Module):
    """The choice of experts is elsewhere: nothing shows that it is a router."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32, bias=False)
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.up(x))


def layer() -> Layer:
    return Layer().bfloat16().requires_grad_(False)


def decisions(model: Any, call: Any = None, **options: Any) -> dict[str, tuple[bool, str]]:
    """module -> (fired, detail) of the pass, after a call of the compiled model."""
    compiled = torch.compile(call or model, backend="compile_ext", options={**OPTIONS, **options})
    with torch.no_grad():
        compiled(torch.randn(5, 32).bfloat16())
    return said(call or model)


def said(model: Any) -> dict[str, tuple[bool, str]]:
    rows = compile_ext.explain(model).rows
    return {r.module: (d.fired, d.detail) for r in rows for d in r.decisions if d.pass_name == PASS}


def test_without_a_mark_it_is_an_ordinary_linear() -> None:
    model = layer()
    compiled = torch.compile(model, backend="compile_ext", options=OPTIONS)
    with torch.no_grad():
        compiled(torch.randn(5, 32).bfloat16())
    assert [e for r in records.live() for e in r.report.entries] == []


@pytest.mark.parametrize("which", [lambda m: m.gate, lambda m: m.gate.proj], ids=["gate", "linear"])
def test_marked(which: Any) -> None:
    model = layer()
    assert compile_ext.mark_router(which(model)) is which(model)
    assert decisions(model) == {"gate.proj": FIRED}


def test_a_parameter_of_the_module_itself() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 32).bfloat16(), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t()

    model = Own()
    compile_ext.mark_router(model)
    assert decisions(model) == {"weight": FIRED}


def test_values() -> None:
    model, x = layer(), torch.randn(5, 32).bfloat16()
    compile_ext.mark_router(model.gate)
    compiled = torch.compile(model, backend="compile_ext", options=OPTIONS)
    with torch.no_grad():
        # One step of bfloat16 at 4: the sum in another order may round to the other side.
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=2.0**-5)


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]


def loaded(model: nn.Module, **how: Any) -> nn.Module:
    state = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(state, **how)
    return model


def with_new_weight(model: Layer) -> Layer:
    model.gate.proj.weight = nn.Parameter(torch.randn(4, 32).bfloat16(), requires_grad=False)
    return model


SURVIVES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved,
    "load_state_dict": loaded,
    "load_state_dict(assign=True)": lambda m: loaded(m, assign=True),
    "to": lambda m: m.float().bfloat16(),
    "a new weight": with_new_weight,
    "eval": lambda m: m.eval(),
}


@pytest.mark.parametrize("change", SURVIVES.values(), ids=SURVIVES)
def test_the_mark_survives(change: Any) -> None:
    model = layer()
    compile_ext.mark_router(model.gate)
    assert decisions(change(model)) == {"gate.proj": FIRED}


def test_a_copy_has_a_mark_of_its_own() -> None:
    model = layer()
    compile_ext.mark_router(model.gate)
    other = copy.deepcopy(model)
    del model
    assert decisions(other) == {"gate.proj": FIRED}


def test_a_new_module_with_the_same_state_has_none() -> None:
    model = layer()
    compile_ext.mark_router(model.gate)
    other = layer()
    other.load_state_dict(model.state_dict())
    decisions(model)
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="compile_ext", options=OPTIONS)
    with torch.no_grad():
        compiled(torch.randn(5, 32).bfloat16())
    assert [e for r in records.live() for e in r.report.entries] == []


def test_after_torch_compile_and_before_the_first_call() -> None:
    model = layer()
    compiled: Any = torch.compile(model, backend="compile_ext", options=OPTIONS)
    compile_ext.mark_router(compiled.gate)
    with torch.no_grad():
        compiled(torch.randn(5, 32).bfloat16())
    assert said(compiled) == {"gate.proj": FIRED}


def test_a_compiled_gate_can_be_marked() -> None:
    model = layer()
    gate: Any = torch.compile(model.gate, backend="compile_ext", options=OPTIONS)
    compile_ext.mark_router(gate)
    with torch.no_grad():
        gate(torch.randn(5, 32).bfloat16())
    assert said(gate) == {"proj": FIRED}


def test_after_the_first_call_explain_says_so() -> None:
    model, x = Layer().bfloat16().requires_grad_(False), torch.randn(5, 32).bfloat16()
    compiled = torch.compile(model, backend="compile_ext", options=OPTIONS)
    with torch.no_grad():
        compiled(x)
        compile_ext.mark_router(model.gate)
        compiled(x)
        reason = "it is marked as a router, and no graph that was compiled since reads its weight"
        assert said(model) == {"gate.proj": (False, reason)}
        torch.compiler.reset()
        compiled(x)
    assert said(model) == {"gate.proj": FIRED}


def test_a_switched_off_pass_says_nothing_of_marks() -> None:
    model = layer()
    compile_ext.mark_router(model.gate)
    assert decisions(model, **{"compile_ext.disable": [PASS]}) == {}


def test_one_that_no_linear_reads() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(32, 8, bias=False).bfloat16().requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return (x[:, None, :] * self.gate.weight).sum(-1)

    model = Odd()
    compile_ext.mark_router(model.gate)
    reason = "it is marked as a router, and read by mul, in no form of a linear that is known"
    assert decisions(model) == {"gate": (False, reason)}
    [row] = compile_ext.explain(model).rows
    assert row.op == "parameter"


def test_one_that_is_refused() -> None:
    model = layer().half()
    compile_ext.mark_router(model.gate)
    compiled = torch.compile(model, backend="compile_ext", options=OPTIONS)
    with torch.no_grad():
        compiled(torch.randn(5, 32).half())
    reason = "x is float16 and the weight float16, not bfloat16 or float32"
    assert said(model) == {"gate.proj": (False, reason)}


def test_one_in_float64_with_a_bias() -> None:
    """Refused for its dtype: the bias is no reason to call it no linear."""
    model = nn.Linear(32, 8).double().requires_grad_(False)
    compile_ext.mark_router(model)
    compiled = torch.compile(model, backend="compile_ext", options=OPTIONS)
    with torch.no_grad():
        compiled(torch.randn(5, 32).double())
    reason = "x is float64 and the weight float64, not bfloat16 or float32"
    assert said(model) == {"weight": (False, reason)}


def test_a_float32_router_that_the_graph_hands_out() -> None:
    """Its choice is in another graph: without a mark no sign of a router."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 32), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.float(), self.weight)

    model = Wide()
    compile_ext.mark_router(model)
    assert decisions(model) == {"weight": (True, "logits stay in float32")}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Two(), "Two with 2 matrices (a.weight, b.weight)"),
        (nn.ReLU(), "ReLU with 0 matrices"),
        (nn.LayerNorm(8), "LayerNorm with 0 matrices"),
        (F.relu, "a function"),
    ],
    ids=["two", "none", "vector", "function"],
)
def test_refuses(module: Any, found: str) -> None:
    with pytest.raises(MarkError) as raised:
        compile_ext.mark_router(module)
    assert raised.value.where == "mark_router"
    assert raised.value.found == found
    assert raised.value.fix.startswith("mark the ")
