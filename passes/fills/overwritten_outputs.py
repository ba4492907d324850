"""Do not fill a buffer that an op overwrites in full.

before: out = zeros(m, n); op_out(x, w, out)         after: out = empty(m, n); op_out(x, w, out)
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.dead_code import erase_writes, is_erasable
from compile_ext.passes.effects import is_plain_write, nodes_in, written_arguments
from compile_ext.passes.fills import empty
from compile_ext.passes.op_calls import OpCall
from compile_ext.passes.readers import is_empty, op_name
from compile_ext.passes.values import (
    fake,
    has_free_size,
    is_static,
    requires_grad,
    same_size,
    storage,
    tensor,
)


def strip_fill(call: OpCall, name: str, ctx: PassContext) -> None:
    """Give one output that the contract names memory without contents."""
    value = call.arguments[name]
    made = _allocation(value) if isinstance(value, Node) else None
    if made is None:
        return  # an input, or nothing: there is no fill
    before = _before(made, call.node)
    writes = [x for x in before if _writes(x, made)]
    if is_empty(made) and not writes and not ctx.poison:
        return
    reason = ctx.stand_back(call.node) or _why_not(call, name, made, before, ctx)
    if reason:
        ctx.skipped(call.node, reason)
        return
    ctx.fired(call.node, f"{name} is overwritten in full: what filled it is gone")
    if call.is_functional:  # it works on a copy: other readers see the buffer as it was
        ctx.rewrite(call, {name: empty.insert_empty(call.arguments[name], call.node, ctx)})
        return
    inputs = [y for x in writes for y in x.all_input_nodes]
    erase_writes(writes)
    ctx.replace(made, empty.insert_empty(made, made, ctx))
    ctx.erase_dead(inputs)


def _allocation(value: Node) -> Node | None:
    """The node that allocates the storage of ``value``, None for the storage of an input."""
    at = storage(value)
    if at is None:
        return None
    while base := next((x for x in value.all_input_nodes if storage(x) == at), None):
        value = base
    return value if value.op in ("call_function", "call_method") else None


def _before(made: Node, op: Node) -> list[Node]:
    """What touches the storage between its allocation and the op, in graph order."""
    found: set[Node] = set()
    todo = [made]
    while todo:
        for user in todo.pop().users:
            if user < op and user not in found:
                found.add(user)
                todo += [user] if storage(user) == storage(made) else []
    return sorted(found)


def _writes(node: Node, made: Node) -> bool:
    return any(storage(x) == storage(made) for x in written_arguments(node))


def _why_not(
    call: OpCall, name: str, made: Node, before: list[Node], ctx: PassContext
) -> str | None:
    value = call.arguments[name]
    for other, x in call.arguments.items():
        if other != name and any(storage(y) == storage(made) for y in nodes_in(x)):
            return f"the op is given the buffer as {other} too"
    if not _covers(value, made):
        return f"{name} is a part of its buffer, and the rest is not overwritten"
    if not is_erasable(made, ctx.scopes):
        return f"{name} comes from {op_name(made.target)}, which may do more than make it"
    if requires_grad(made):
        return f"{name} requires grad"
    if has_free_size(made):
        return f"the size of {name} depends on data"
    if not call.is_functional:
        for x in before:
            is_view = storage(x) == storage(made) and not written_arguments(x)
            if not is_view and not (is_plain_write(x) and _fills_alone(x, made)):
                return f"{name} is used before the op overwrites it"
    # On copies the op may be given a view, whose form the copy has; else the buffer is made anew.
    whole, before_it = (value, call.node) if call.is_functional else (made, made)
    reason = empty.why_no_empty(whole, before_it)
    return f"{name}: {reason}" if reason else None


def _fills_alone(write: Node, made: Node) -> bool:
    """A plain write reads what it copies: not from the buffer itself."""
    reads = [x for x in write.all_input_nodes if x not in written_arguments(write)]
    return all(storage(x) != storage(made) for x in reads)


def _covers(value: Node, made: Node) -> bool:
    """Whether ``value`` is all of the memory that ``made`` allocates, each element once."""
    part, whole = tensor(value), tensor(made)
    assert isinstance(part, Tensor)
    if whole is None:
        return False
    if value is made or fake(value) is fake(made):
        return True
    if not all(map(is_static, (*part.shape, *part.stride(), *whole.shape, *whole.stride()))):
        same = zip((*part.shape, *part.stride()), (*whole.shape, *whole.stride()), strict=False)
        return part.dim() == whole.dim() and all(same_size(x, y) for x, y in same)
    return _is_dense(part) and part.numel() == whole.numel()


def _is_dense(x: Tensor) -> bool:
    """Its elements lie side by side, in some order of the dimensions."""
    step = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1):
        if stride != step:
            return False
        step *= size
    return True
