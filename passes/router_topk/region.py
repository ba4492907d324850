"""The nodes between a router's logits and the experts' weights and ids, and who else reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from compile_ext.passes.readers import is_choice, is_score_step
from compile_ext.passes.router_topk.choice import Choice, read_choice
from compile_ext.passes.router_topk.follow import Followed
from compile_ext.passes.values import is_static, tensor


@dataclass(eq=False)
class Region:
    """
    Args:
        router: the node of the logits.
        choice: what is computed of them.
        ends: the nodes of the weights and of the ids, where there are any.
        inner: all nodes of it, the ends among them.
        written: the node that the weights' end writes in place: behind it, the same tensor.
    """

    router: Node
    choice: Choice
    ends: tuple[Node, ...]
    inner: set[Node]
    written: Node | None

    @property
    def bias(self) -> Node | None:
        return self.choice.bias.args[0] if self.choice.bias is not None else None

    def readers(self, end: Node) -> list[tuple[Node, Node]]:
        """Who reads an end outside of the region, each with the node that it reads."""
        nodes = [end]
        if self.written is not None and end is self.ends[0]:
            nodes.append(self.written)
        return [(u, x) for x in nodes for u in x.users if u not in self.inner and end < u]

    def why_not_alone(self) -> str | None:
        """Who else reads what is computed in between."""
        known = {pair for end in self.ends for pair in self.readers(end)}
        for x in sorted(self.inner):
            for user in x.users:
                if user not in self.inner and (user, x) not in known:
                    return f"{user.name} reads {x.name}, a value inside the choice"
        return None


def find_region(found: Followed) -> Region | str | None:
    """None where no experts are chosen; a reason where they are chosen in another way."""
    logits = tensor(found.router)
    assert logits is not None
    if not is_static(logits.shape[-1]):
        return "the number of experts is symbolic" if _is_chosen_from(found.router) else None
    n = int(logits.shape[-1])
    reasons: list[str] = []
    for node in reversed(list(_computed(found))):
        choice = read_choice(found.exprs[node], found.logits, n)
        if isinstance(choice, Choice):
            return _region(node, choice, found)
        reasons += [choice] if choice is not None else []
    if not reasons and _is_chosen_from(found.router):
        return "a step between the logits and the weights of the experts is not known"
    return reasons[0] if reasons else None


def _is_chosen_from(router: Node) -> bool:
    """Whether the largest of what the logits become are looked for."""
    seen: set[Node] = set()
    todo = [router]
    while todo:
        users = [x for x in todo.pop().users if x not in seen]
        if any(map(is_choice, users)):
            return True
        seen.update(users)
        todo += filter(is_score_step, users)
    return False


def _computed(found: Followed) -> Iterator[Node]:
    """Those that compute something: no views, no casts of what others hold, no pairs."""
    for node, expr in found.exprs.items():
        held = [found.exprs.get(x) for x in node.all_input_nodes if tensor(x) is not None]
        is_cast = expr in held or (expr.op == "round" and expr.args[0] in held)
        if tensor(node) is not None and not is_cast:
            yield node


def _region(weights: Node, choice: Choice, found: Followed) -> Region:
    ids = (x for x, e in found.exprs.items() if e.op == "top_ids" and e.args == choice.ids)
    ends = (weights, *[x for x in ids if tensor(x) is not None][:1])
    last = max(ends)
    inner: set[Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        is_buffer = node in found.writes.values()
        if node in inner or not (node in found.exprs or is_buffer):
            continue
        inner.add(node)
        todo += node.all_input_nodes
        todo += [w for w, x in found.writes.items() if x is node and not last < w]
    return Region(found.router, choice, ends, inner, found.writes.get(weights))
