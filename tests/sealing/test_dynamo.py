"""A seal and Dynamo: first compiles, recompiles, any backend, and nothing left behind."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_ext import CompileEvent, SealError, seal

WAYS = [("eager", False), ("eager", True), ("aot_eager", False), ("compile_ext", False)]


def x(m: int = 3) -> Tensor:
    return torch.linspace(-1, 1, m * 8).view(m, 8)


@pytest.mark.parametrize(("backend", "fullgraph"), WAYS)
def test_a_first_compile_is_refused_and_works_later(
    model: nn.Module, backend: str, fullgraph: bool
) -> None:
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    with seal("error"), pytest.raises(SealError) as refused:
        compiled(x())
    event = refused.value.event
    assert event.kind == "dynamo"
    code: Any = type(model).forward.__code__
    assert event.kernel == f"Model.forward ({code.co_filename}:{code.co_firstlineno})"
    assert event.shapes == ("x: float32[3, 8]",)
    assert event.reason == ""
    assert "before the seal" in refused.value.fix
    torch.testing.assert_close(compiled(x()), model(x()))
    with seal("error"):
        compiled(x())


def test_a_recompile_says_which_guard(model: nn.Module, heard: list[CompileEvent]) -> None:
    compiled = torch.compile(model, backend="eager", dynamic=False)
    compiled(x(3))
    with seal("error"), pytest.raises(SealError) as refused:
        compiled(x(5))
    assert refused.value.event.reason == (
        "tensor 'x' size mismatch at index 0. expected 3, actual 5"
    )
    assert "mark_dynamic" in refused.value.fix
    with seal(heard.append):
        compiled(x(5))
        compiled(x(5))
    assert [e.reason for e in heard] == [refused.value.event.reason]


def test_a_failed_shape_guard_is_told(model: nn.Module, heard: list[CompileEvent]) -> None:
    example = x(5)
    torch._dynamo.mark_dynamic(example, 0, min=2, max=8)
    compiled = torch.compile(model, backend="eager")
    compiled(example)
    with seal(heard.append):
        compiled(x(7))
        compiled(x(16))
    assert len(heard) == 1
    assert heard[0].shapes == ("x: float32[16, 8]",)
    assert "8" in heard[0].reason
    assert "size()[0]" in heard[0].reason


def test_another_backend_is_another_compile(model: nn.Module, heard: list[CompileEvent]) -> None:
    torch.compile(model, backend="eager")(x())
    with seal(heard.append):
        torch.compile(model, backend="aot_eager")(x())
    assert [e.reason for e in heard] == ["another backend, or other options of torch.compile"]


@torch._dynamo.config.patch(suppress_errors=True)
def test_suppressed_errors_are_no_way_out(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager")
    with seal("error"), pytest.raises(SealError):
        compiled(x())
    with seal("error"), pytest.raises(SealError):  # the frame was not left to eager
        compiled(x())
    torch.testing.assert_close(compiled(x()), model(x()))
    with seal("error"):
        compiled(x())


@torch._dynamo.config.patch(accumulated_recompile_limit=8)
def test_many_refusals_do_not_use_up_the_recompile_limit(model: nn.Module) -> None:
    graphs: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compiled = torch.compile(model, backend=backend, dynamic=False)
    compiled(x(2))
    for m in range(3, 20):
        with seal("error"), pytest.raises(SealError):
            compiled(x(m))
    assert len(graphs) == 1
    compiled(x(3))
    assert len(graphs) == 2  # compiled, not left to eager


def test_a_graph_break_is_a_frame_more(heard: list[CompileEvent]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    compiled: Any = torch.compile(function, backend="eager")
    with seal(heard.append):
        compiled(x())
    assert len(heard) == 2
    assert heard[0].kernel.startswith("function (")
    assert heard[1].kernel.startswith("torch_dynamo_resume_in_function_at_")
    with seal("error"):
        compiled(x())


def test_what_is_disabled_is_not_compiled(heard: list[CompileEvent]) -> None:
    """Dynamo looks for its own frames on the stack, between which ours stand."""

    def function(x: Tensor) -> Tensor:
        return x + 1

    @torch.compile(backend="eager")
    def outer(x: Tensor) -> Tensor:
        return disabled(x) * 2

    disabled: Any = torch._dynamo.disable(recursive=False)(function)
    with seal(heard.append):
        outer(x())
    names = [re.sub(r"_at_\d+", "", e.kernel.split(" ")[0]) for e in heard]
    assert names == ["outer", "torch_dynamo_resume_in_outer"]


def test_a_callback_is_told_and_the_call_goes_on(
    model: nn.Module, heard: list[CompileEvent]
) -> None:
    compiled = torch.compile(nn.Sequential(model)[0], backend="eager")
    with seal(heard.append):
        torch.testing.assert_close(compiled(x()), model(x()))
    assert [(e.kind, e.op, e.key) for e in heard] == [("dynamo", "", "")]


def test_a_layer_is_named_by_its_path(model: nn.Module, heard: list[CompileEvent]) -> None:
    layer: Any = model.layer
    layer.compile(backend="eager")
    with seal(heard.append):
        model(x())
    assert [e.modules for e in heard] == [("layer",)]


def test_a_module_of_torch_is_named_too(heard: list[CompileEvent]) -> None:
    """Dynamo compiles a function of its own around it."""
    layer = nn.Linear(8, 4)
    model = nn.ModuleDict({"head": layer})
    with seal(heard.append):
        torch.compile(layer, backend="eager")(x())
    code = nn.Linear.forward.__code__
    assert heard[0].kernel == f"Linear.forward ({code.co_filename}:{code.co_firstlineno})"
    assert heard[0].shapes == ("args: (float32[3, 8])",)
    assert heard[0].modules == ("head",)
    assert model["head"] is layer


def test_what_a_callback_compiles_is_not_told(model: nn.Module) -> None:
    other: Any = torch.compile(lambda x: x + 1, backend="eager")
    heard: list[str] = []

    def callback(event: CompileEvent) -> None:
        heard.append(event.kernel)
        other(x())

    with seal(callback):
        torch.compile(model, backend="eager")(x())
    assert len(heard) == 1


def test_what_a_callback_raises_comes_through(model: nn.Module) -> None:
    def callback(event: CompileEvent) -> None:
        raise LookupError(event.kind)

    compiled = torch.compile(model, backend="eager")
    with seal(callback), pytest.raises(LookupError, match="dynamo"):
        compiled(x())
    torch.testing.assert_close(compiled(x()), model(x()))


def test_a_compile_in_any_thread_counts(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager")
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            compiled(x())
        except SealError as error:
            errors.append(error)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    with seal("error"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(errors) == 4
    torch.testing.assert_close(compiled(x()), model(x()))


def test_compile_callbacks_of_others_still_run(model: nn.Module) -> None:
    from torch._dynamo.callback import callback_handler

    started: list[str] = []

    def start(args: Any) -> None:
        started.append(args.compile_id)

    callback_handler.register_start_callback(start)
    try:
        with seal(lambda event: None):
            torch.compile(model, backend="eager")(x())
    finally:
        callback_handler.remove_start_callback(start)
    assert len(started) == 1


def test_a_reset_under_the_seal_leaves_it_on(model: nn.Module) -> None:
    compiled = torch.compile(model, backend="eager")
    compiled(x())
    with seal("error"):
        torch._dynamo.reset()
        with pytest.raises(SealError):
            compiled(x())
