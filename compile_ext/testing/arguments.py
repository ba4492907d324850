"""The call that the contract is tried on: arguments by schema name, checked, as CPU copies."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from compile_ext.ops.errors import ContractError
from compile_ext.testing.memory import copied, tensors_in

Arguments = dict[str, Any]
Devices = dict[str, list[str]]  # of the tensors in each argument


def bind(op: OpOverload, inputs: Sequence[Any] | Mapping[str, Any], where: str) -> Arguments:
    """All arguments by schema name, defaults filled in; ContractError where they do not fit."""
    schema = op._schema.arguments
    names = [a.name for a in schema]
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str):
        positional = [a.name for a in schema if not a.kwarg_only]
        if len(inputs) > len(positional):
            found = f"{len(inputs)} positional arguments"
            fix = "pass fewer, and keyword-only ones by a dict of all arguments"
            raise ContractError(where, found, f"at most {len(positional)}: {positional}", fix)
        given = dict(zip(positional, inputs, strict=False))
    else:
        found = f"inputs of type {type(inputs).__name__}"
        fix = "pass (x, w, ...), or {'x': x, ...}"
        raise ContractError(where, found, "a sequence of arguments, or a dict by name", fix)
    unknown = [name for name in given if name not in names]
    missing = [a.name for a in schema if a.name not in given and not a.has_default_value()]
    if unknown or missing:
        found = " and ".join(
            [f"unknown arguments {unknown}"] * bool(unknown)
            + [f"no value for {missing}"] * bool(missing)
        )
        raise ContractError(where, found, f"{op._schema}", "name each argument as the schema does")
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def on_cpu(arguments: Arguments, where: str) -> tuple[Arguments, Devices]:
    """Copies on the CPU, and the device that each tensor is from."""
    for name, value in arguments.items():
        for x in tensors_in(value):
            _refuse_tensor(name, x, where)
        _refuse_unpicklable(name, value, where)
    devices = {name: [str(x.device) for x in tensors_in(v)] for name, v in arguments.items()}
    plain = pytree.tree_map(
        lambda x: x.detach().resolve_conj().resolve_neg() if isinstance(x, Tensor) else x,
        arguments,
    )
    return copied(plain, lambda x: "cpu"), devices


def _refuse_tensor(name: str, x: Tensor, where: str) -> None:
    what = None
    if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        what = "a FakeTensor" if isinstance(x, FakeTensor) else f"the subclass {type(x).__name__}"
    elif is_functorch_wrapped_tensor(x):
        what = "inside a transform of torch.func"
    elif x.layout != torch.strided or x.is_quantized:
        what = f"of layout {x.layout}" if x.layout != torch.strided else "quantized"
    elif x.device.type not in ("cpu", "cuda"):
        what = f"on {x.device}"
    if what is not None:
        raise ContractError(
            where,
            f"argument {name!r}, a tensor that is {what}",
            "plain strided tensors with data, on the CPU or on CUDA",
            f"pass {name} as such a tensor",
        )


def _refuse_unpicklable(name: str, value: Any, where: str) -> None:
    try:
        pickle.dumps(pytree.tree_map(lambda x: None if isinstance(x, Tensor) else x, value))
    except Exception as error:
        raise ContractError(
            where,
            f"argument {name!r} of type {type(value).__name__}, which cannot be pickled ({error})",
            "arguments that can be handed to another process",
            "try the op's contract on a call without it",
        ) from error
