"""Give the choice of experts behind a router one op.

    before: p = softmax(logits); w, ids = topk(p, k); w /= w.sum(-1, keepdim=True)
    after:  w, ids = router_topk(logits, None, k, "softmax", ..., renormalize=True)

    before: scores = sigmoid(logits); ...; ids = topk(masked_fill(scores + bias, ~mask, -inf), k)[1]
            w = scores.gather(1, ids); w /= w.sum(-1, keepdim=True) + 1e-20; w = w * 2.5
    after:  w, ids = router_topk(logits, bias, k, "sigmoid", groups, top_groups, -inf, True, 2.5)

Spellings are not compared. What is behind the logits of a router_gemm is run on fakes, and read off
its ATen ops (``router_topk/``), writes in place among them.
Legal: nothing else reads what lies between the logits and the results; the logits themselves may
have other readers. The weights are those of eager but for rounding; so are the experts, where no
two are closer than that. Of equal scores ``torch.topk`` takes any, on CUDA others than on the CPU,
and the op the first. What was computed of logits rounded to bfloat16 (gpt-oss) is computed of
those in float32. With ``sorted=False`` the order of the k was open, and is now that of the scores.
Bails: another choice (what differs is named), other readers, logits that are written, autocast, a
gradient.
Looks at nothing where the op would run its reference: opaque to Inductor and unfused inside, that
is slower than what it replaces.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from compile_ext.ops.define import why_reference
from compile_ext.ops.errors import CompileExtError
from compile_ext.ops.router_gemm import OP as ROUTER_GEMM
from compile_ext.ops.router_gemm_m1 import OP as ROUTER_GEMM_M1
from compile_ext.ops.router_topk import OP as ROUTER_TOPK
from compile_ext.ops.router_topk import check
from compile_ext.passes.context import PassContext
from compile_ext.passes.expressions.traces import Traces
from compile_ext.passes.fit_result import fit_result
from compile_ext.passes.op_calls import overload
from compile_ext.passes.router_topk.follow import follow
from compile_ext.passes.router_topk.region import Region, find_region
from compile_ext.passes.values import fake, same_size, tensor
from compile_ext.passes.views import is_written_through


def lower_router_topk(graph: Graph, ctx: PassContext) -> None:
    routers = [x for x in graph.nodes if overload(x) in (ROUTER_GEMM, ROUTER_GEMM_M1)]
    traces = Traces(ctx.scopes)
    for router in filter(_has_kernel, routers):
        region = find_region(follow(router, traces, ctx))
        if region is None:
            continue
        reason = region if isinstance(region, str) else _why_not(region, ctx) or _place(region, ctx)
        if reason is not None:
            ctx.skipped(router, reason)
        elif isinstance(region, Region):
            ctx.fired(router, str(region.choice))


def _has_kernel(router: Node) -> bool:
    """Whether the device has a kernel for the op; what it would be called with is not known yet."""
    choice = None, 1, "softmax", 1, 1, 0.0, False, 1.0
    return why_reference(ROUTER_TOPK, tensor(router), *choice) is None


def _why_not(region: Region, ctx: PassContext) -> str | None:
    reason = next((r for x in sorted(region.inner) if (r := ctx.stand_back(x))), None)
    if reason is not None:
        return reason
    router = region.router
    if is_written_through(router, ctx):
        return "the graph writes the logits"
    logits, bias = tensor(router), tensor(region.bias)
    assert logits is not None
    n = logits.shape[-1]
    if bias is not None and not (same_size(bias.numel(), n) and same_size(bias.shape[-1], n)):
        return f"its bias is {list(bias.shape)}, not [{n}]"
    args = logits, None if bias is None else bias.reshape(-1), *region.choice.arguments
    try:
        check(*args)
    except CompileExtError as refusal:
        return str(refusal)
    return why_reference(ROUTER_TOPK, *args) or region.why_not_alone()


def _place(region: Region, ctx: PassContext) -> str | None:
    """Put the op there, or leave the graph as it was and say why."""
    before, router, bias = min(region.ends), region.router, region.bias
    mark = before.prev
    if bias is not None and len(bias.meta["example_value"].shape) != 1:
        bias = ctx.insert(before, "reshape", bias, -1)
    call = ctx.insert(before, ROUTER_TOPK, router, bias, *region.choice.arguments)
    placed: list[tuple[Node, Node]] = []
    for i, end in enumerate(region.ends):
        part: Node | str = ctx.insert(before, operator.getitem, call, i, like=end)
        want = tensor(end)
        assert want is not None
        assert isinstance(part, Node)
        if fake(part).dtype != want.dtype:
            part = ctx.insert(before, "to", part, want.dtype, like=end)
        part = fit_result(part, end, router, before, ctx)
        if isinstance(part, str):
            while before.prev is not mark:
                before.graph.erase_node(before.prev)
            return part
        placed.append((end, part))
    for number in region.choice.numbers:
        number.guard()
    for end, part in placed:
        for user, read in region.readers(end):
            user.replace_input_with(read, part)
    read_before = [y for x in region.inner for y in x.all_input_nodes if y not in region.inner]
    for x in sorted(region.inner, reverse=True):
        before.graph.erase_node(x)
    ctx.erase_dead(dict.fromkeys(read_before))
    return None
