"""How far each argument of a GEMM grows when N or K is padded, read off the op's contract."""

from __future__ import annotations

from typing import Any, Protocol

from compile_ext.ops.contract import Align, Gemm, OpContract, Pad
from compile_ext.passes.derivation import Padding
from compile_ext.passes.values import is_static, tensor

Widths = dict[int, tuple[int, float]]  # axis -> (new elements at its end, their value)
Sizes = dict[str, int]  # "n", "k" -> elements


class Call(Protocol):
    """A call by schema name: of nodes (``OpCall``), or of tensors (``compile_ext.testing``)."""

    @property
    def contract(self) -> OpContract: ...

    @property
    def arguments(self) -> dict[str, Any]: ...


def growth(call: Call, gemm: Gemm) -> tuple[Sizes, Sizes] | str:
    """N and K of the weight, and what each lacks to its multiple; or why that cannot be told."""
    b = tensor(call.arguments[gemm.b])
    if b is None or b.dim() != 2:
        return f"{gemm.b} is not a matrix"
    sizes = dict(zip("nk" if gemm.layout == "nt" else "kn", b.shape, strict=True))
    if not all(is_static(sizes[d]) for d in call.contract.align):
        return "N or K is symbolic"
    return sizes, {d: -int(sizes[d]) % a.multiple for d, a in call.contract.align.items()}


def argument_widths(call: Call, gemm: Gemm, sizes: Sizes, grow: Sizes) -> dict[str, Widths] | str:
    """The arguments that grow and how; or why that cannot be told."""
    align = {d: a for d, a in call.contract.align.items() if grow[d]}
    found: dict[str, Widths] = {}
    # In schema order, never in that of a set: the order of the extra inputs is part of the caches'
    # key.
    for name, value in call.arguments.items():
        if value is not None and any(name in a.pad for a in align.values()):
            widths = _widths(name, value, gemm, sizes, grow, align)
            if isinstance(widths, str):
                return widths
            if widths:
                found[name] = widths
    return found


def _widths(
    name: str, value: Any, gemm: Gemm, sizes: Sizes, grow: Sizes, align: dict[str, Align]
) -> Widths | str:
    found = tensor(value)
    if found is None:
        return f"{name} is not a tensor"
    widths: Widths = {}
    for dim, spec in ((d, a.pads()[name]) for d, a in align.items() if name in a.pad):
        one = all(is_static(s) and s == 1 for s in found.shape)
        blocks = -(-int(sizes[dim]) // spec.block)
        extra = -(-(int(sizes[dim]) + grow[dim]) // spec.block) - blocks
        # One scale for the whole tensor stays; the scale of its only block gets a second one.
        is_only_block = spec.block > 1 and blocks == 1 and extra > 0
        if one and name in (gemm.scale_a, gemm.scale_b) and not is_only_block:
            continue
        axis = _axis(name, found.shape, gemm, dim, spec, blocks)
        if isinstance(axis, str):
            return axis
        if extra:
            widths[axis] = (extra, spec.value)
    if len({v for _, v in widths.values()}) > 1:
        return f"{name} would need two pad values"
    return widths


def _axis(name: str, shape: Any, gemm: Gemm, dim: str, spec: Pad, size: int) -> int | str:
    if spec.axis is not None:
        axes = [spec.axis % len(shape)] if -len(shape) <= spec.axis < len(shape) else []
    elif name == gemm.a:
        axes = [len(shape) - 1]
    elif name == gemm.b:
        axes = [("nk" if gemm.layout == "nt" else "kn").index(dim)]
    else:
        axes = [i for i, s in enumerate(shape) if is_static(s) and s == size]
    if len(axes) != 1 or not is_static(shape[axes[0]]) or shape[axes[0]] != size:
        return f"{name} of shape {list(shape)} has no single axis of {size} for {dim.upper()}"
    return axes[0]


def padding_of(source: Any, widths: Widths, is_transposed: bool = False) -> Padding:
    """The padding of a node or a tensor that grows by ``widths``; of its transpose, where what
    grows is its transposed view."""
    found = tensor(source)
    assert found is not None  # it has widths
    rank = found.dim()
    pad = [0] * (2 * rank)
    fill = 0.0
    for axis, (extra, value) in widths.items():
        at = 1 - axis if is_transposed else axis
        pad[2 * (rank - 1 - at) + 1] = extra
        fill = value
    while pad[-2:] == [0, 0]:  # F.pad counts from the last dimension: no width for those that stay
        pad = pad[:-2]
    return Padding(tuple(pad), fill, keep_order=True)
