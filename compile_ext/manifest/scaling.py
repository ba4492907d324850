"""What each rank of a tensor-parallel group calls, worked out from the calls of the whole model.

A layer is divided by output features (N), or, where it follows one that is, by input features (K).
The names of its module say which, as checkpoints and engines have them; what is in no list is
divided by N. An op whose name says that it is a router is on every rank, as is what is no GEMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from compile_ext.manifest.manifest import Manifest, ManifestSite, Shard
from compile_ext.manifest.resize import aligned, resized
from compile_ext.manifest.schema import registered
from compile_ext.ops.call_site import CallSite, TensorForm, Value
from compile_ext.ops.contract import Gemm, OpContract
from compile_ext.ops.errors import ManifestError
from compile_ext.ops.registry import contract_of

_K = ("o_proj", "down_proj", "out_proj", "wo", "w2", "fc2", "dense_4h_to_h", "c_proj")
_REPLICATED = (
    *("gate", "router", "shared_expert_gate"),
    *("q_a_proj", "kv_a_proj", "kv_a_proj_with_mqa", "wq_a", "wkv_a"),  # low rank, of DeepSeek
    *("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"),
)
# Elements that one element of a block scale stands for, the first that fits: DeepSeek's blocks, MX
# and NVFP4.
_BLOCKS = (1, 128, 32, 16, 64, 256)


def scaled(manifest: Manifest, parts: int, shards: Mapping[str, Shard | None]) -> Manifest:
    """Raises ManifestError."""
    if type(parts) is not int or parts < 1:
        found, fix = f"tensor_parallel = {parts!r}", "pass the number of ranks"
        raise ManifestError("Manifest.scaled", found, "a whole number from 1", fix)
    for pattern, shard in shards.items():
        if shard not in ("n", "k", "batch", None):
            found = f"shards[{pattern!r}] = {shard!r}"
            fix = "say which dimension each rank has a part of; None for all of both"
            raise ManifestError("Manifest.scaled", found, "'n', 'k', 'batch' or None", fix)
    sites = []
    for site in manifest.sites:
        contract = _contract(site)
        for shard, modules in _groups(site, contract.gemm, shards).items():
            call = site.call
            if shard is not None and contract.gemm is not None and parts > 1:
                call = _divided(call, contract, contract.gemm, shard, parts, modules[0])
            sites.append(ManifestSite(call, modules))
    return Manifest(tuple(sites), manifest.not_covered)


def _contract(site: ManifestSite) -> OpContract:
    op = registered(site.call.op)
    contract = contract_of(op) if op is not None else None
    if contract is None:
        wanted = "an op with a contract, which says which arguments have N and K"
        fix = "import the package that registers it"
        raise ManifestError("Manifest.scaled", f"{site.call.op}, not known here", wanted, fix)
    return contract


def _groups(
    site: ManifestSite, gemm: Gemm | None, shards: Mapping[str, Shard | None]
) -> dict[Shard | None, tuple[str, ...]]:
    """The modules of a site, by what each is divided by."""
    found: dict[Shard | None, tuple[str, ...]] = {}
    for module in site.modules:
        shard = _shard(module, site.call.op, gemm, shards)
        found[shard] = (*found.get(shard, ()), module)
    return found


def _shard(
    module: str, op: str, gemm: Gemm | None, shards: Mapping[str, Shard | None]
) -> Shard | None:
    for pattern, shard in shards.items():
        if fnmatchcase(module, pattern):
            return shard
    if gemm is None or "router" in op:
        return None
    for part in reversed(module.split(".")):
        name = part.removesuffix("_weight")
        if name in _REPLICATED:
            return None
        if name in _K:
            return "k"
    # [tokens, heads, ...]: the heads are divided, as attention divides them.
    return "batch" if gemm.m_axis == 0 else "n"


def _divided(
    call: CallSite, contract: OpContract, gemm: Gemm, shard: Shard, parts: int, module: str
) -> CallSite:
    arguments = dict(call.arguments)
    b = arguments[gemm.b]
    if not isinstance(b, TensorForm) or len(b.shape) < 2 + (shard == "batch"):
        raise _refused(module, f"{gemm.b} = {b!r}", f"a weight with a dimension {shard}")
    axis = _axis_of_weight(gemm, shard)
    whole = b.shape[axis]
    if not isinstance(whole, int) or whole % parts:
        found = f"{shard} = {whole} in {parts} parts"
        raise _refused(module, found, "equal parts")
    part = whole // parts
    if shard in contract.align:  # which fold_weight_padding sees to on each rank
        multiple = contract.align[shard].multiple
        part = -(-part // multiple) * multiple

    def divide(name: str | None, axis: int, block: bool = False) -> None:
        form = arguments.get(name) if name else None
        if name and isinstance(form, TensorForm) and -len(form.shape) <= axis < len(form.shape):
            arguments[name] = _with_part(form, axis, whole, part, block, module)

    divide(gemm.b, axis)
    scale_b = arguments.get(gemm.scale_b) if gemm.scale_b else None
    if isinstance(scale_b, TensorForm):
        is_vector = len(scale_b.shape) == 1
        if not is_vector or shard == "n":
            divide(gemm.scale_b, -1 if is_vector else axis, block=True)
    if shard == "n":
        divide(gemm.bias, -1)
        for buffer in contract.overwritten:
            divide(buffer, -1)
    elif shard == "k":
        divide(gemm.a, -1)
        divide(gemm.scale_a, -1, block=True)
    else:
        at = 1 if gemm.m_axis == 0 else 0
        for tensor in (gemm.a, gemm.scale_a, *contract.overwritten):
            divide(tensor, at)
    for name, memory in contract.memory.items():
        form = arguments[name]
        if isinstance(form, TensorForm):
            arguments[name] = aligned(form, memory.stride)
    n, k = part if shard == "n" else call.n, part if shard == "k" else call.k
    return replace(call, arguments=tuple(arguments.items()), n=n, k=k)


def _axis_of_weight(gemm: Gemm, shard: Shard) -> int:
    if shard == "batch":
        return 0
    return -2 if (shard == "n") == (gemm.layout == "nt") else -1


def _with_part(
    form: TensorForm, axis: int, whole: int, part: int, has_blocks: bool, module: str
) -> Value:
    """The form where ``axis`` has ``part`` of the dimension's ``whole``, or the blocks of it. One
    scale for everything stays."""
    axis %= len(form.shape)
    size = form.shape[axis]
    if has_blocks and size == 1:
        return form
    blocks = _BLOCKS if has_blocks else (1,)
    block = next((x for x in blocks if size == -(-whole // x)), None)
    if block is None:
        raise _refused(module, f"{form.shape}, axis {axis}", f"{whole} elements or blocks of them")
    try:
        return resized(form, axis, -(-part // block))
    except ValueError as error:
        raise _refused(module, f"{error}", "strides that follow from the shape") from error


def _refused(module: str, found: str, wanted: str) -> ManifestError:
    fix = f"say how it is divided: shards={{{module!r}: ...}}, None for not at all"
    return ManifestError(f"Manifest.scaled, {module}", found, wanted, fix)
