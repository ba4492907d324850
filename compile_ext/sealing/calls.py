"""Whose call a compile is for, found on the stack when it happens: nothing is noted before."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from compile_ext.ops import define
from compile_ext.ops.contract import m_of_gemm

# What `define_op` registers for an op: `definition` and `args` are among its variables.
_RUN = next(
    x for x in define.define_op.__code__.co_consts if isinstance(x, CodeType) and x.co_name == "run"
)


@dataclass(frozen=True)
class OpCall:
    """A call of an op of this package.

    Args:
        op: its name.
        m: tokens; None where the op is no GEMM and its first argument has no rows.
        arguments: by schema name.
        weights: those that name the module: of a GEMM the weight, else all.
    """

    op: str
    m: int | None
    arguments: dict[str, Any]
    weights: tuple[Any, ...]


def frames() -> Iterable[FrameType]:
    """Of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def op_call() -> OpCall | None:
    """The innermost call of an op of this package in this thread."""
    frame = next((x for x in frames() if x.f_code is _RUN and "args" in x.f_locals), None)
    if frame is None:
        return None
    definition, args = frame.f_locals["definition"], frame.f_locals["args"]
    names = [x.name for x in definition.overload._schema.arguments]
    arguments = dict(zip(names, args, strict=False))
    gemm, name = definition.gemm, str(definition.overload._schema.name)
    weights = tuple(arguments.values()) if gemm is None else (arguments[gemm.b],)
    return OpCall(name, _tokens(definition, arguments), arguments, weights)


def _tokens(definition: define.OpDefinition, arguments: dict[str, Any]) -> int | None:
    if definition.gemm is not None:
        a = arguments[definition.gemm.a]
        return int(m_of_gemm(definition.overload, definition.gemm, a))
    first = next((x for x in arguments.values() if isinstance(x, Tensor)), None)
    return int(first.shape[0]) if first is not None and first.ndim else None


def described(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The tensors, numbers and texts of a call, ``name: dtype[sizes]`` each."""
    found = ((name, _described(value)) for name, value in arguments.items())
    return tuple(f"{name}: {text}" for name, text in found if text)


def _described(value: Any) -> str | None:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}"
    if isinstance(value, (bool, int, float, str, torch.SymInt)):
        return str(value)
    if isinstance(value, dict):
        return _described([f"{key}: {text}" for key, x in value.items() if (text := _described(x))])
    if isinstance(value, (list, tuple)):
        parts = [text for x in value if (text := _described(x))]
        return f"({', '.join(parts)})" if parts else None
    return None


def fix_for(call: OpCall | None) -> str:
    """What would have compiled a kernel that this call launches."""
    if call is None:
        return "make this call before the seal: no op of compile_ext does, so no warmup knows of it"
    tokens = f"max_tokens={call.m}" if call.m is not None else "max_tokens=..."
    more = f", or more: M = {call.m} here" if call.m is not None else ""
    return f"compile_ext.warmup(model, {tokens}) before the seal{more}"
