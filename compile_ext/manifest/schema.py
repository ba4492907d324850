"""Whether a call fits the schema of its op, where somebody has registered that here."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch._ops import OpOverload

from compile_ext.manifest.checked import MOST_ELEMENTS, Fault
from compile_ext.ops.call_site import (
    CallSite,
    NotReachable,
    SizeValue,
    TensorForm,
    Value,
    find_overload,
    value_of,
)

_NAME = re.compile(r"[A-Za-z]\w*::[A-Za-z_]\w*\.\w+", re.ASCII)
_TAKEN: dict[str, type | tuple[type, ...]] = {
    "Tensor": TensorForm,
    "int": (int, SizeValue),
    "SymInt": (int, SizeValue),
    "float": (int, float),
    "bool": bool,
    "str": str,
    "ScalarType": (int, torch.dtype),  # an int where the schema's default is one
}
_FIX = "collect the model again with the releases that are installed"


def check_call(call: CallSite, at: str) -> None:
    """Raises Fault."""
    if not _NAME.fullmatch(call.op):
        raise Fault(f"{at}.op = {call.op!r}", "namespace::name.overload")
    for name, value in call.arguments:
        if isinstance(value, TensorForm) and _elements(value, call.m[0]) > MOST_ELEMENTS:
            found = f"{at}.{name} of shape {value.shape} and strides {value.strides}"
            raise Fault(found, f"up to {MOST_ELEMENTS} elements at the fewest tokens")
    op = registered(call.op)
    if op is None:
        return
    schema = {a.name: a for a in op._schema.arguments}
    given = dict(call.arguments)
    if list(given) != list(schema):
        found = f"{at} with the arguments {', '.join(given) or 'none'}"
        raise Fault(found, f"those of {call.op}: {', '.join(schema)}", _FIX)
    for name, value in given.items():
        if not _fits(schema[name].real_type, value):
            wanted = f"a {schema[name].real_type}, as {call.op} takes"
            raise Fault(f"{at}.{name} = {value!r}", wanted, _FIX)


def _elements(form: TensorForm, m: int) -> int:
    """How many a storage needs; 0 where the call cannot have this M."""
    try:
        shape, strides = ([value_of(x, m) for x in xs] for xs in (form.shape, form.strides))
        offset = value_of(form.offset, m)
    except NotReachable:
        return 0
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return max(offset + span + 1, math.prod(shape))


def registered(name: str) -> OpOverload | None:
    """The op of this name, None where nobody has registered it in this process."""
    try:
        op: Any = find_overload(name)
    except (AttributeError, RuntimeError):
        return None
    return op if isinstance(op, OpOverload) else None


def _fits(kind: Any, value: Value) -> bool:
    name = str(kind)
    if name.startswith("Optional["):
        return value is None or _fits(kind.getElementType(), value)
    if name.startswith("List["):
        of = kind.getElementType()
        return isinstance(value, tuple) and all(_fits(of, x) for x in value)
    if type(value) is bool and name != "bool":
        return name == "number"
    return isinstance(value, _TAKEN.get(name, object))
