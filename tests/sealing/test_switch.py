"""The switch itself: on and off, several seals, what they say, and that nothing is left behind."""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from typing import Any

import pytest
from torch._dynamo import convert_frame
from torch._inductor import compile_fx

from compile_ext import CompileEvent, SealError, seal
from compile_ext.ops.errors import ArgumentError, CompileExtError
from compile_ext.sealing import patches, telling

EVENT = CompileEvent(
    "triton",
    "a_kernel",
    ("a: float8_e4m3fn[4097, 7168]",),
    "k1",
    "compile_ext::scaled_mm",
    ("layers.0.down",),
    "compile_ext.warmup(model, max_tokens=4097) before the seal",
    "a reason",
)


def happen() -> None:
    telling.tell(lambda: EVENT)


def fail(same: list[bool]) -> None:
    assert same == [False] * 4
    raise ZeroDivisionError


def hooks() -> list[Any]:
    return [
        convert_frame._compile,
        convert_frame.CatchErrorsWrapper.__call__,
        compile_fx.fx_codegen_and_compile,
        compile_fx._compile_fx_inner,
        *sys.meta_path,
    ]


def test_what_an_event_and_an_error_say() -> None:
    what = (
        "triton compiles a_kernel (a: float8_e4m3fn[4097, 7168]) for compile_ext::scaled_mm of"
        " layers.0.down [key k1]: a reason"
    )
    assert str(EVENT) == f"{what}; fix: {EVENT.fix}"
    with seal("error"), pytest.raises(SealError) as refused:
        happen()
    error = refused.value
    assert str(error) == f"seal: found {what}; wanted nothing to compile; fix: {EVENT.fix}"
    assert isinstance(error, CompileExtError)
    again = pickle.loads(pickle.dumps(error))
    assert (again.event, str(again)) == (EVENT, str(error))


def test_warn_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with seal("warn"):
        happen()
    assert caplog.record_tuples == [("compile_ext.seal", logging.WARNING, str(EVENT))]


@pytest.mark.parametrize("action", ["Error", "", None, 3])
def test_another_action_is_refused(action: Any) -> None:
    with pytest.raises(ArgumentError, match=r'"error", "warn" or a function'):
        seal(action)


def test_every_hook_goes_after_an_exception() -> None:
    before = hooks()
    with pytest.raises(ZeroDivisionError), seal("error"):
        fail([a is b for a, b in zip(before[:4], hooks()[:4], strict=True)])
    assert hooks() == before
    happen()  # tells nobody


def test_on_and_off_again_are_the_same() -> None:
    before, heard = hooks(), []
    switch = seal(heard.append)
    happen()
    switch.on()
    switch.on()
    happen()
    switch.off()
    happen()
    switch.off()
    assert heard == [EVENT]
    assert hooks() == before


def test_one_seal_in_itself_goes_with_the_outer_block() -> None:
    switch = seal("error")
    with switch, switch:
        pass
    happen()
    with switch:
        with switch:
            pass
        with pytest.raises(SealError):
            happen()


def test_a_block_leaves_a_switch_that_was_on_as_it_was() -> None:
    switch = seal("error")
    switch.on()
    with switch:
        pass
    with pytest.raises(SealError):
        happen()
    switch.off()
    happen()


def test_of_several_one_that_refuses_is_enough_and_all_hear() -> None:
    heard: list[CompileEvent] = []
    with seal("error"), seal(heard.append), pytest.raises(SealError):
        happen()
    with seal(heard.append), seal("error"), pytest.raises(SealError):
        happen()
    with seal(heard.append):
        with seal("error"):
            pass
        happen()
    assert heard == [EVENT] * 3


def test_seals_of_many_threads() -> None:
    """Each hears at least its own, and the hooks go with the last."""
    before = hooks()
    counts: list[int] = []

    def serve() -> None:
        for _ in range(50):
            heard: list[CompileEvent] = []
            with seal(heard.append):
                happen()
            counts.append(len(heard))

    threads = [threading.Thread(target=serve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 400
    assert min(counts) >= 1
    assert hooks() == before


def test_a_patch_that_others_have_wrapped_does_nothing_more() -> None:
    module: Any = type(sys)("compile_ext_test_patched")
    module.function = lambda: "original"
    sys.modules[module.__name__] = module
    said: list[str] = []

    def wrap(original: Any) -> Any:
        return lambda: (said.append("watched"), original())[1]

    patch = patches.Patches([patches.Patch(module.__name__, "function", wrap)])
    patch.put_in()
    ours = module.function
    module.function = lambda: f"wrapped {ours()}"
    theirs = module.function
    assert (module.function(), said) == ("wrapped original", ["watched"])
    patch.take_out()
    assert module.function is theirs
    assert (module.function(), said) == ("wrapped original", ["watched"])
    del sys.modules[module.__name__]


def test_a_refusal_of_another_thread_comes_out_of_what_wraps_it() -> None:
    def compile() -> None:
        try:
            raise EVENT.error()
        except SealError as error:
            raise RuntimeError("BackendCompilerFailed") from error

    with pytest.raises(SealError):
        telling.surfacing(compile)()


def test_other_errors_come_through_as_they_are() -> None:
    def compile() -> None:
        raise LookupError("of the user")

    with seal("error"), pytest.raises(LookupError, match="of the user"):
        telling.surfacing(compile)()
