"""The choice of experts: scores of float32 logits, the top k of them, and their weights.

    p[m, e] = softmax_e(logits[m, e]) or sigmoid(logits[m, e])
    c[m, e] = p[m, e] + bias[e]              the bias takes part in the choice alone
    ids[m, i]: the top k of c, where only experts of the best groups keep their c
    weights[m, i] = scale * p[m, ids] / sum of these p

Softmax and sigmoid keep the order of the logits. So where nothing is added to them, the logits
themselves are compared: two that round to one score are still told apart.
Groups, bias and scale: DeepSeek-V3, arXiv 2412.19437, equations 13 to 16; the code that DeepSeek
published with it takes the sum of the best two for the score of a group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from compile_ext.ops import checks, triton_support
from compile_ext.ops.contract import OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.errors import ArgumentError, RankError

NAME = "router_topk"
SCORES = ("softmax", "sigmoid")
TINY = 1e-20  # added to a sum of weights before it divides, as DeepSeek's models do
MAX_EXPERTS, MAX_TOP_K = 2048, 32  # of the Triton kernel, which holds a row in registers


def router_topk_ref(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scores: str,
    groups: int,
    top_groups: int,
    masked: float,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The specification. Of equal values the first counts as larger, and NaN as the largest."""
    p = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    if groups > 1:
        c = _mask_groups(p if bias is None else p + bias, groups, top_groups, masked)
    else:
        c = logits if bias is None else p + bias
    ids = _first_largest(c, top_k)[1]
    weights = p.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * scale, ids


def _mask_groups(c: Tensor, groups: int, top_groups: int, masked: float) -> Tensor:
    """``c`` with ``masked`` in the place of the experts outside the best groups."""
    grouped: Tensor = c.unflatten(-1, (groups, -1))
    best = _first_largest(grouped, 2)[0].sum(-1)
    chosen = _first_largest(best, top_groups)[1]
    stays = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True)
    return grouped.masked_fill(~stays.unsqueeze(-1), masked).flatten(-2)


def _first_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``torch.topk``, whose order of equal values differs from device to device. 0.0 and -0.0 are
    equal, and all NaN: a sort on CUDA tells their bits apart."""
    x = torch.where(x.isnan(), torch.nan, x + 0.0)
    values, indices = (y[..., :k] for y in x.sort(dim=-1, descending=True, stable=True))
    # Not contiguous(): one row with the strides of the whole counts as such.
    return values, indices.clone(memory_format=torch.contiguous_format)


def check(logits: Tensor, bias: Tensor | None, *choice: Any) -> None:
    """Raise for arguments that the op refuses."""
    checks.dtype_in(NAME, "logits", logits, (torch.float32,))
    if logits.dim() == 0:
        raise RankError(
            NAME, "logits of shape []", "at least 1 dimension", "pass logits as [..., n]"
        )
    check_choice(NAME, "bias", bias, logits.shape[-1], *choice)
    checks.same_device(NAME, logits=logits, bias=bias)


def check_choice(
    op: str,
    name: str,
    bias: Tensor | None,
    n: checks.Size,
    top_k: int,
    scores: str,
    groups: int,
    top_groups: int,
    *_: Any,
) -> None:
    """Check a choice among n experts; ``name`` is that of its bias in the op."""
    if bias is not None:
        checks.dtype_in(op, name, bias, (torch.bfloat16, torch.float16, torch.float32))
        checks.shape_is(op, name, bias, (n,))
    if scores not in SCORES:
        raise ArgumentError(op, f"scores = {scores!r}", " or ".join(SCORES), "name one of them")
    experts = checks.known(n)
    if top_k < 1 or (experts is not None and top_k > experts):
        raise ArgumentError(op, f"top_k = {top_k}, n = {n}", "1 to n", "choose 1 to n experts")
    if not 1 <= top_groups <= groups:
        found = f"top_groups = {top_groups}, groups = {groups}"
        raise ArgumentError(op, found, "1 to groups", "pass 1 and 1 where there are no groups")
    if groups > 1 and experts is not None and (experts % groups or experts < 2 * groups):
        found, wanted = f"groups = {groups}, n = {n}", "groups of one size, 2 experts or more"
        raise ArgumentError(op, found, wanted, "pass 1 and 1 where there are no groups")


def fake_choice(x: Tensor, lead: tuple[checks.Size, ...], top_k: int) -> tuple[Tensor, Tensor]:
    """Empty weights and ids of these tokens, on the device of x."""
    weights = x.new_empty(*lead, top_k, dtype=torch.float32)
    return weights, x.new_empty(*lead, top_k, dtype=torch.int64)


def _fake(logits: Tensor, bias: Tensor | None, top_k: int, *choice: Any) -> tuple[Tensor, Tensor]:
    return fake_choice(logits, logits.shape[:-1], top_k)


def _why_not_triton(logits: Tensor, bias: Tensor | None, top_k: int, *_: object) -> str | None:
    return triton_support.why_not(logits) or why_too_many(logits.shape[-1], top_k)


def why_too_many(n: int | torch.SymInt, top_k: int) -> str | None:
    """Why a program of the Triton kernels cannot hold a row, or None."""
    if not checks.at_most(n, MAX_EXPERTS):
        return f"takes up to {MAX_EXPERTS} experts, n is {n}"
    return None if top_k <= MAX_TOP_K else f"takes top_k up to {MAX_TOP_K}, found {top_k}"


OP = define_op(
    f"{NAME}(Tensor logits, Tensor? bias, int top_k, str scores, int groups, int top_groups,"
    " float masked, bool renormalize, float scale) -> (Tensor weights, Tensor ids)",
    check=check,
    fake=_fake,
    kernels=(
        Kernel(
            "triton", _why_not_triton, triton_support.run_of("router_topk_triton"), prefetches=True
        ),
        Kernel("reference", why_not=never, run=router_topk_ref, compiles=False),
    ),
    contract=OpContract(prewait_reads=("bias",)),
)


def router_topk(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    scores: str = "softmax",
    groups: int = 1,
    top_groups: int = 1,
    masked: float = -math.inf,
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose ``top_k`` experts a token, and weigh them.

    Args:
        logits: ``[..., n]`` float32, any strides.
        bias: ``[n]`` bfloat16, float16 or float32, added to the scores for the choice
            (DeepSeek-V3's e_score_correction_bias); the weights are those without it.
        top_k: 1 to n.
        scores: ``softmax`` over all n (Qwen3-MoE, Mixtral) or ``sigmoid`` (DeepSeek-V3, GLM-4-MoE).
            A softmax over the chosen logits alone (gpt-oss) is ``softmax`` with ``renormalize``.
        groups, top_groups: n is cut into ``groups`` runs of at least 2; an expert stays as it is
            in the ``top_groups`` of them whose best two, in the choice, have the largest sum.
        masked: what an expert outside of these counts as in the choice: minus infinity, or 0 as in
            transformers 4.
        renormalize: whether weights are divided by their sum (plus 1e-20).
        scale: multiplies the weights at the end.

    Returns:
        ``weights [..., top_k]`` float32 and ``ids [..., top_k]`` int64, contiguous, the largest
        first. Of equal values the lowest index comes first, among groups too; a NaN counts as the
        largest value, and makes of a softmax NaN weights. No id is ever outside 0..n - 1.

    Raises:
        DtypeError, RankError, ShapeError, ArgumentError, DeviceError, GradError.
    """
    weights, ids = OP(logits, bias, top_k, scores, groups, top_groups, masked, renormalize, scale)
    return weights, ids
