"""Attention residuals and the RMSNorm behind them: a layer's input is no plain sum of what the
layers before it gave, but a mixture that each token weighs for itself.

    v[m] = blocks[m, 0], ..., blocks[m, l - 1], x[m]                     rows of k, in float32
    score[m, i] = sum_k query[k] * v[m, i, k] / sqrt(mean_k(v[m, i, k]^2) + key_eps)
    mixed[m] = sum_i softmax_i(score[m])[i] * v[m, i]                    then rounded to x's dtype
    y = rms_norm(mixed, weight, eps, round_before_weight)

Kimi Team, Attention Residuals, arXiv 2603.15031: x is the sum of the layers since the last block,
``query`` the layer's pseudo-query times the weight of the norm on the keys. As Kimi K3's model code
computes it, in float32 throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import checks, triton_support
from compile_ext.ops.contract import OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.rms_norm import FLOATS, check_norm, rms_norm_ref

NAME = "attn_residual"


def mix_ref(v: Tensor, query: Tensor, key_eps: float) -> Tensor:
    """The specification of ``mixed``, of ``v [m, l, k]``."""
    wide = v.float()
    keys = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + key_eps)
    weights = (keys * query.float()).sum(-1).softmax(-1)
    return torch.matmul(weights.unsqueeze(1), wide).squeeze(1).to(v.dtype)


def attn_residual_ref(
    x: Tensor,
    blocks: Tensor,
    query: Tensor,
    key_eps: float,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor]:
    """The specification."""
    mixed = mix_ref(torch.cat((blocks, x.unsqueeze(1)), 1), query, key_eps)
    return rms_norm_ref(mixed, weight, eps, round_before_weight), mixed


def _check(
    x: Tensor,
    blocks: Tensor,
    query: Tensor,
    key_eps: float,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
) -> None:
    check_norm(NAME, x, weight)
    m, k = x.shape
    checks.dtype_in(NAME, "blocks", blocks, (x.dtype,))
    checks.rank_is(NAME, "blocks", blocks, 3, "[m, l, k]")
    checks.shape_is(NAME, "blocks", blocks, (m, blocks.shape[1], k))
    checks.dtype_in(NAME, "query", query, FLOATS)
    checks.shape_is(NAME, "query", query, (k,))
    checks.same_device(NAME, x=x, blocks=blocks, query=query)


def _fake(
    x: Tensor,
    blocks: Tensor,
    query: Tensor,
    key_eps: float,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


OP = define_op(
    f"{NAME}(Tensor x, Tensor blocks, Tensor query, float key_eps, Tensor? weight, float eps,"
    " bool round_before_weight) -> (Tensor y, Tensor mixed)",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel(
            "triton",
            triton_support.why_not,
            triton_support.run_of("attn_residual_triton"),
            prefetches=True,
        ),
        Kernel("reference", why_not=never, run=attn_residual_ref, compiles=False),
    ),
    contract=OpContract(prewait_reads=("weight", "query")),
)


def attn_residual(
    x: Tensor,
    blocks: Tensor,
    query: Tensor,
    key_eps: float = 1e-6,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """A softmax-weighted sum over what earlier layers gave, and its RMSNorm.

    Args:
        x: ``[m, k]`` bfloat16, float16 or float32, any strides, k >= 1: the newest of them.
        blocks: ``[m, l, k]`` of x's dtype, any strides (``stacked.transpose(0, 1)`` of a stack
            ``[l, m, k]``): the ones before. l = 0 leaves x as it is.
        query: ``[k]`` bfloat16, float16 or float32: the pseudo-query, times the weight of the norm
            on the keys where that has one.
        key_eps: added to the mean of squares of a key.
        weight, eps, round_before_weight: of the norm of the mixture, as in ``rms_norm``.

    Returns:
        ``y [m, k]``, ``rms_norm`` of the mixture, and ``mixed [m, k]``, the mixture in x's dtype.
        Both contiguous.

    Raises:
        DtypeError, RankError, ShapeError, DeviceError, GradError.
    """
    y, mixed = OP(x, blocks, query, key_eps, weight, eps, round_before_weight)
    return y, mixed
