"""Compile Triton kernels ahead of their first launch, on any host: what is compiled follows from
the arguments of a launch alone (dtypes, whether a number is 1 or a multiple of 16, constexprs).

Imports Triton when asked. Checked with Triton 3.6 and 3.7.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compile_ext.ops import device, launches, triton_support
from compile_ext.ops.compile_unit import CompileUnit
from compile_ext.ops.device import Target

_GROUP = "__grp__"  # of the file that names the files of an entry by their full path
_WARP = 32
_PATCH = threading.Lock()
_patched = 0
_OURS: dict[Any, Any] = {}  # what stands in for ``run`` of a class


class TritonCompiler:
    """Triton, whose cache is a folder for each entry, named by a hash of what it is made from."""

    name = "triton"
    needs_device = False

    def why_not(self, target: Target) -> str | None:
        if not triton_support.is_installed():
            return "Triton is not installed: pip install triton"
        from triton import knobs

        if knobs.runtime.interpret:
            return "Triton interprets in this process: unset TRITON_INTERPRET"
        return None

    def folder(self) -> Path:
        from triton import knobs

        return Path(knobs.cache.dir)

    def compile(self, unit: CompileUnit, target: Target, stage: Path) -> None:
        import triton

        from compile_ext.ops.renew import renewed  # which knows all ops

        source, options = renewed(unit, target).how
        before = os.environ.get(triton_support.CACHE_VARIABLE)
        os.environ[triton_support.CACHE_VARIABLE] = str(stage)  # read at each use
        try:
            triton.compile(source, target=_gpu(target), options=options)
        finally:
            if before is None:
                del os.environ[triton_support.CACHE_VARIABLE]
            else:
                os.environ[triton_support.CACHE_VARIABLE] = before

    def arrived(self, entry: Path) -> tuple[str, ...]:
        """The group file names its files by their full path: those of the folder that it was
        written in. Triton loads what it names, so it must name all."""
        groups = sorted(entry.glob(f"{_GROUP}*.json"))
        present = {x.name for x in entry.iterdir() if x.is_file()}
        present -= {path.name for path in groups}
        for path in groups:
            content = json.loads(path.read_text())
            names = content.get("child_paths", {}) if isinstance(content, dict) else {}
            files = {name: str(entry / name) for name in names}
            if not files or set(files) != present:
                raise ValueError(f"{path.name} does not name the files that are there")
            if files == names:
                continue
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps({**content, "child_paths": files}))
            temporary.replace(path)
        return tuple(path.name for path in groups)


TRITON = TritonCompiler()


@contextmanager
def noting() -> Iterator[None]:
    """Inside, launches of Triton kernels by a thread that records are noted, and not made. Those
    that Triton interprets compile nothing."""
    if not triton_support.is_installed():
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    notes = {
        JITFunction: _note,
        Autotuner: _note_each_configuration,
        InterpretedFunction: _note_nothing,
    }
    _patch(+1, notes)
    try:
        yield
    finally:
        _patch(-1, notes)


def _patch(change: int, notes: dict[Any, Any]) -> None:
    """What others put over ours meanwhile stays, and ours below it: it passes all launches on."""
    global _patched
    with _PATCH:
        if _patched == 0 and change > 0:
            for cls, note in notes.items():
                cls.run = _OURS[cls] = _noting_run(cls.run, note)
        _patched += change
        if _patched == 0:
            for cls in notes:
                if vars(cls)["run"] is _OURS[cls]:
                    cls.run = cls.run.__wrapped__


def _noting_run(run: Any, note: Any) -> Any:
    @functools.wraps(run)
    def noting_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if launches.recorder() is None:  # another thread's
            return run(self, *args, **kwargs)
        return note(self, *args, **kwargs)

    return noting_run


def _note_each_configuration(self: Any, *args: Any, **kwargs: Any) -> None:
    """Of an autotuned kernel: any of its configurations may be the fastest."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    for config in self.prune_configs(kwargs):
        self.fn.run(*args, **{**kwargs, **config.all_kwargs()})


def _note_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


def _note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    noted, target = launches.recorder(), device.target()
    assert noted is not None
    assert target is not None
    noted.append(launch_of(self, args, kwargs, target))


def launch_of(function: Any, args: Any, kwargs: dict[str, Any], target: Target) -> launches.Launch:
    """What ``function[grid](*args, **kwargs)`` launches on ``target``: as ``JITFunction.run`` finds
    it."""
    from triton import knobs

    options = {
        **kwargs,
        "debug": kwargs.get("debug", function.debug) or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
    }
    backend, bind, known = _binder(function, target)
    bound, specialization, rest = bind(*args, **options)
    form = repr((specialization, sorted(rest.items())))
    if form not in known:  # 0.3 ms: a plan asks for each of hundreds of M
        known[form] = _launch_of(function, backend, options, bound, specialization, rest, target)
    return known[form]


def _launch_of(
    function: Any,
    backend: Any,
    options: dict[str, Any],
    bound: Any,
    specialization: Any,
    rest: Any,
    target: Target,
) -> launches.Launch:
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    parsed, signature, constexprs, attributes = function._pack_args(
        backend, options, bound, specialization, rest
    )
    source = _source(function)(function, signature, constexprs, attributes)
    made_from = (
        ("triton", triton.__version__),
        ("arch", target.arch),
        ("source", function.cache_key),
        ("signature", str(signature)),
        ("constants", str(sorted((str(k), _text(v)) for k, v in constexprs.items()))),
        ("attributes", str(attributes)),
        ("options", parsed.hash()),
        ("backend", backend.hash()),
        ("environment", str(get_cache_invalidating_env_vars())),
    )
    how = source, parsed.__dict__
    return launches.Launch(TRITON, function.__name__, made_from, how)


def _source(function: Any) -> Any:
    """The class of its source: Gluon has one of its own."""
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _text(constant: Any) -> str:
    return str(getattr(constant, "cache_key", constant))


@functools.lru_cache(maxsize=1024)
def _binder(function: Any, target: Target) -> tuple[Any, Any, dict[str, launches.Launch]]:
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(_gpu(target))
    bind = create_function_from_signature(function.signature, function.params, backend)
    return backend, bind, {}


def _gpu(target: Target) -> Any:
    from triton.backends.compiler import GPUTarget

    major, minor = target.capability
    return GPUTarget("cuda", 10 * major + minor, _WARP)
