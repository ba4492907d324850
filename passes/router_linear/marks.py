"""What is said of a weight that ``compile_ext.mark_router`` names, where no linear reads it."""

from __future__ import annotations

from torch.fx import Node

from compile_ext.passes.context import PassContext
from compile_ext.passes.readers import is_view, op_name, read_cast


def report_marked(ctx: PassContext) -> None:
    """Name the marked weights of which the running pass has said nothing in any graph."""
    said = [e for e in ctx.report.entries if any(d.pass_name == ctx.pass_name for d in e.decisions)]
    for index in sorted(ctx.marked - {i for e in said for i in e.weights}):
        node = ctx.scopes[0].placeholders()[index]
        readers = ", ".join(dict.fromkeys(op_name(x.target) for x in _readers(node)))
        what = f"{readers}, in no form of a linear that is known" if readers else "no linear"
        ctx.skipped(node, f"it is marked as a router, and read by {what}")


def _readers(node: Node) -> list[Node]:
    found: list[Node] = []
    for user in node.users:
        is_form = is_view(user) or read_cast(user) is not None
        found += _readers(user) if is_form and user.users else [user]
    return found
