"""What the passes say of one graph: the decision on each candidate, the GEMM sites, and the calls
that a warmup makes again."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from compile_ext.ops.call_site import CallSite


@dataclass(frozen=True)
class Decision:
    """What one pass did with one candidate.

    Args:
        pass_name: the pass.
        fired: whether it rewrote the candidate.
        detail: what it did, or why it did not.
    """

    pass_name: str
    fired: bool
    detail: str


@dataclass(frozen=True)
class Site:
    """One GEMM call in a compiled graph.

    Args:
        op: the operator, ``namespace::name``.
        m: smallest and largest number of tokens; None for no upper bound.
        n, k: output and input features, after padding.
        a_dtype, b_dtype, out_dtype: without the ``torch.`` prefix.
        scales: shapes of scale_a and scale_b, ``-`` for none.
        bias: whether there is one.
        kernel: the kernel that runs (for a third-party op, its own: ``-``); where that depends on
            M, each with its range.
        passed_over: why each kernel that would be preferred does not: ``name: reason``.
    """

    op: str
    m: tuple[int, int | None]
    n: int | str
    k: int | str
    a_dtype: str
    b_dtype: str
    out_dtype: str
    scales: tuple[str, str]
    bias: bool
    kernel: str
    passed_over: tuple[str, ...] = ()


@dataclass(eq=False)
class Entry:
    """One row of the report: a candidate, its site if it is a GEMM with a contract, all decisions
    on it; or a call that no pass has said anything of.

    ``weight`` is the position of its weight among the inputs of the root graph, None for a GEMM of
    two activations; ``hint`` is a name from the graph for that case. One body called from two
    places has two. ``call`` is what a warmup makes again; ``not_covered`` says why it cannot, or
    not to the end: what the call compiles is not known then.
    """

    op: str
    weights: tuple[int, ...]
    hint: str
    decisions: list[Decision] = field(default_factory=list)
    site: Site | None = None
    call: CallSite | None = None
    not_covered: str | None = None


@dataclass(eq=False)
class GraphReport:
    """All entries of one graph. Keeps no tensor and no node once :meth:`finish` has run."""

    entries: list[Entry] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    disabled: tuple[str, ...] = ()
    _of_node: dict[Node, Entry] = field(default_factory=dict)

    def entry(self, node: Node, op: str, weights: tuple[int, ...], hint: str) -> Entry:
        """The entry of a node, made at first sight; the op's name follows the rewrites."""
        found = self._of_node.get(node)
        if found is None:
            found = self._of_node[node] = Entry(op, weights, hint)
            self.entries.append(found)
        found.op = op
        return found

    def moved(self, old: Node, new: Node) -> None:
        """A pass put ``new`` in the place of ``old``: what was said of it stays with it."""
        if old in self._of_node:
            self._of_node[new] = self._of_node.pop(old)

    def finish(self) -> None:
        self._of_node.clear()
