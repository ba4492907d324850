"""Shapes and dtypes of the tensors behind expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from compile_ext.passes.expressions.expression import Expr
from compile_ext.passes.values import dtype_name, is_static, same_size

FLOAT32 = torch.float32
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_NARROWER = {
    torch.float32: (*LOW.values(), torch.float8_e4m3fn, torch.float8_e5m2),
    torch.float64: (*LOW.values(), torch.float32),
}


@dataclass(frozen=True)
class Value:
    """A tensor of a trace: what it holds (None: not known), and its form."""

    expr: Expr | None
    shape: tuple[Any, ...]
    dtype: torch.dtype


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether every number of one dtype is one of the other."""
    return source == target or source in _NARROWER.get(target, ())


def same_shape(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dim() == y.dim() and all(map(same_size, x.shape, y.shape))


def is_one(size: Any) -> bool:
    return is_static(size) and size == 1


def named(name: str, dtype: torch.dtype) -> str:
    """An operation in this dtype."""
    return name if dtype == FLOAT32 else f"{name}.{dtype_name(dtype)}"
