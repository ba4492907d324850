"""Give a tensor's form another size along one axis, with strides in the order that it has."""

from __future__ import annotations

from dataclasses import replace

from compile_ext.ops.call_site import NotReachable, Size, TensorForm, value_of

# Numbers of tokens that tell two expressions in M apart: primes, and multiples of what sizes are
# aligned to.
_TOKENS = (64, 97, 1024, 4093)


def resized(form: TensorForm, axis: int, size: int) -> TensorForm:
    """The form with ``size`` along ``axis``. Strides of what lies outside of the axis follow: where
    rows are packed they stay so, and rows of a wider tensor are a part of a wider tensor that is
    divided as they are.

    Raises:
        ValueError: a stride does not divide.
    """
    before = form.shape[axis]
    shape = tuple(size if i == axis else x for i, x in enumerate(form.shape))
    strides = list(form.strides)
    order = sorted(range(len(shape)), key=lambda i: (_at(form.strides[i], 64), -i))
    for i, inner in zip(order[order.index(axis) + 1 :], order[order.index(axis) :], strict=False):
        if _is_same(form.strides[i], _times(form.shape[inner], form.strides[inner])):
            strides[i] = _times(shape[inner], strides[inner])
        else:
            strides[i] = _part(form.strides[i], size, before)
    return replace(form, shape=shape, strides=tuple(strides))


def aligned(form: TensorForm, multiple: int) -> TensorForm:
    """The form with strides that are multiples, but those of 1, as a copy that fits has them."""
    strides = [
        -(-s // multiple) * multiple if isinstance(s, int) and s > 1 else s for s in form.strides
    ]
    return replace(form, strides=tuple(strides))


def _at(size: Size, m: int) -> float:
    try:
        return value_of(size, m)
    except NotReachable:
        return float("inf")


def _is_same(x: Size, y: Size) -> bool:
    return x == y or all(_at(x, m) == _at(y, m) for m in _TOKENS)


def _times(x: Size, y: Size) -> Size:
    if isinstance(x, int) and isinstance(y, int):
        return x * y
    if 1 in (x, y):
        return x if y == 1 else y
    number, other = (x, y) if isinstance(x, int) else (y, x)
    return f"{number}*{other}" if str(other).isidentifier() else f"{number}*({other})"


def _part(stride: Size, size: int, before: Size) -> Size:
    if not isinstance(stride, int) or not isinstance(before, int) or stride * size % before:
        raise ValueError(f"a stride of {stride} over {before} elements")
    return stride * size // before
