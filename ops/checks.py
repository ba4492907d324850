"""Argument checks shared by the ops. Each raises one of the errors with found / wanted / fix.

They run on fakes too, so a size may be symbolic: a check fails only where the sizes are known to
differ (``guard_or_true``), and never specialises a graph.
"""

from __future__ import annotations

import torch

from compile_ext.ops.errors import DeviceError, DtypeError, LayoutError, RankError, ShapeError

Size = int | torch.SymInt
FP8 = torch.float8_e4m3fn
# Why a kernel for FP8 activations does not run.
WANTS_FP8 = "takes float8_e4m3fn, a is bfloat16: quantize it with quantize_fp8_groups"


def same(x: Size, y: Size) -> bool:
    """Whether two sizes are equal, or may be (symbolic and not known)."""
    if type(x) is int and type(y) is int:
        return x == y
    # Loads sympy, 0.2 s: not at import time.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(x == y))


def is_zero(size: Size) -> bool:
    """Whether a size is known to be 0; a symbolic one that may be is not. Adds no guard."""
    if type(size) is int:
        return size == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size == 0))


def at_most(size: Size, bound: int) -> bool:
    """Whether a size is known to be ``bound`` or less; a symbolic one that may be more is not. Adds
    no guard: a choice of kernel must not cost a graph."""
    if type(size) is int:
        return size <= bound
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size <= bound))


def known(size: Size) -> int | None:
    """The number that a size is known to be, or None; adds no guard."""
    if isinstance(size, int):
        return size
    found: int | None = size.node.maybe_as_int()
    return found


def dtype_in(op: str, name: str, x: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if x.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise DtypeError(
            op,
            f"{name} of {str(x.dtype).removeprefix('torch.')}",
            names,
            f"pass {name} as {names}",
        )


def rank_is(op: str, name: str, x: torch.Tensor, rank: int, form: str | None = None) -> None:
    """``form`` names the dimensions (``[g, n, k]``) where a reshape would not do."""
    if x.dim() != rank:
        reshape = f"reshape {name}, for example {name}.reshape(-1, {name}.shape[-1])"
        raise RankError(
            op,
            f"{name} of shape {list(x.shape)}",
            f"{rank} dimensions",
            f"pass {name} as {form}" if form else reshape,
        )


def same_device(op: str, **tensors: torch.Tensor | None) -> None:
    present = {k: v for k, v in tensors.items() if v is not None}
    (first, reference), *rest = present.items()
    for name, x in rest:
        if x.device != reference.device:
            raise DeviceError(
                op,
                f"{name} on {x.device} and {first} on {reference.device}",
                "all tensors on one device",
                f"move {name} with .to({str(reference.device)!r})",
            )


def same_k(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    if not same(a.shape[-1], b.shape[-1]):
        raise ShapeError(
            op,
            f"a {list(a.shape)} and b {list(b.shape)}",
            "a [..., k] and b [n, k] with one k",
            "b is stored [n, k], as torch.nn.Linear.weight is: pass it untransposed",
        )


def rows_contiguous(op: str, name: str, x: torch.Tensor) -> None:
    """The last dimension has stride 1 (a row of one element has no stride that matters)."""
    # The stride first: it is static, where the number of tokens may be known only at run time.
    if same(x.stride(-1), 1) or x.shape[-1] == 1 or any(same(size, 0) for size in x.shape):
        return
    raise LayoutError(
        op,
        f"{name} of shape {list(x.shape)} with strides {list(x.stride())}",
        "stride 1 in the last dimension",
        f"pass {name}.contiguous()",
    )


def shape_is(op: str, name: str, x: torch.Tensor, *allowed: tuple[Size, ...]) -> None:
    for shape in allowed:
        if x.dim() == len(shape) and all(same(u, v) for u, v in zip(x.shape, shape, strict=True)):
            return
    wanted = " or ".join(str(list(s)) for s in allowed)
    raise ShapeError(
        op,
        f"{name} of shape {list(x.shape)}",
        wanted,
        f"reshape or rebuild {name}",
    )


def bias_fits(op: str, bias: torch.Tensor | None, n: Size) -> None:
    if bias is not None:
        dtype_in(op, "bias", bias, (torch.bfloat16, torch.float16, torch.float32))
        shape_is(op, "bias", bias, (n,))


def out_dtype_is_float(op: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DtypeError(
            op,
            f"out_dtype {dtype}",
            "bfloat16, float16 or float32",
            "leave out_dtype out for bfloat16",
        )
