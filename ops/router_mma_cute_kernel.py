"""The router of few tokens on the tensor cores.

out[m, n] = sum_k a[m, k] * b[n, k] + bias[n]

A cluster of CTAs has 16 columns; its warps divide K in pieces of 32, and the sums meet in the
shared memory of the CTA that stores the column (``st.async``, which an mbarrier counts).
``mma.m16n8k16`` wants of each lane pairs of neighbours in k, 8 apart; but the order of k is free as
long as both operands share it. With 8 neighbours a lane both go from global memory to the tensor
cores in loads of 16 bytes, and never through shared memory.
The weight comes into registers before the PDL wait, that is while the kernel in front still runs;
the activation, and every store, come after it.

Imports CuTe DSL: only the compiler imports this module.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from compile_ext.ops.cute_device import bits_of, float_of, mma_m16n8k16
from compile_ext.ops.router_dot_cute_kernel import DTYPES, PAIRS

COLUMNS = 16  # rows of a tensor core's tile
PIECE = 32  # of k: 4 lanes, 8 neighbours each
PADDING = 4  # between the sums of two warps, in words, so that 8 lanes read from 8 banks


class RouterMma:
    """Args: ``router_cute_parameters.MmaParameters``."""

    def __init__(self, parameters: Any) -> None:
        self.p = parameters

    def arguments(self) -> tuple[Any, ...]:
        """a, b, bias, out, stride_a, stride_b, m, n: what the host passes."""
        memory = AddressSpace.gmem
        pairs = make_ptr(Int32, 16, memory, assumed_align=16)
        dtype = DTYPES[self.p.bias or "float32"]
        bias = make_ptr(dtype, 16, memory, assumed_align=dtype.width // 8)
        out = make_ptr(Float32, 16, memory, assumed_align=4)
        return pairs, pairs, bias, out, Int64(8), Int64(8), Int32(1), Int32(1)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        bias: cute.Pointer,
        out: cute.Pointer,
        stride_a: Int64,
        stride_b: Int64,
        m: Int32,
        n: Int32,
        stream,
    ):
        p = self.p
        self.kernel(a, b, bias, out, stride_a, stride_b, m, n).launch(
            grid=[cute.ceil_div(n, COLUMNS) * p.cluster * cute.ceil_div(m, p.tokens), 1, 1],
            block=[p.threads, 1, 1],
            cluster=[p.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        bias: cute.Pointer,
        out: cute.Pointer,
        stride_a: Int64,
        stride_b: Int64,
        m: Int32,
        n: Int32,
    ):
        p = const_expr(self.p)
        own = const_expr(COLUMNS // p.cluster)  # columns that this CTA stores
        results = const_expr(own * p.tokens)
        sources = const_expr(p.cluster * p.warps)
        row = const_expr(results + PADDING)  # of one source
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane, warp, rank = thread % 32, thread // 32, cta % p.cluster
        # Neighbours have the same columns: the second one finds the weight in the L2.
        tiles_of_m = cute.ceil_div(m, p.tokens)
        group, first_token = (
            cta // p.cluster // tiles_of_m,
            cta // p.cluster % tiles_of_m * p.tokens,
        )
        line, quarter = lane // 4, lane % 4  # of a fragment: its row, and its place in k
        sums = cute.arch.alloc_smem(Int32, const_expr(sources * row), 16)
        arrived = cute.arch.alloc_smem(Int64, 1, 8)

        # Before the wait: what no kernel of the graph writes.
        weights = cute.make_rmem_tensor((PAIRS, 2, p.pieces), Int32)
        if const_expr(not p.is_even):
            weights.fill(0)
        for half in range_constexpr(2):
            column = cutlass.min(group * COLUMNS + line + 8 * half, n - 1)
            start = b + cute.assume(Int64(column) * (stride_b // 2), divby=PAIRS)
            for i in range_constexpr(p.pieces):
                self.load(start, rank, warp, quarter, i, column >= 0, weights[None, half, i])
        cute.arch.griddepcontrol_launch_dependents()
        if thread == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, const_expr(sources * results * 4))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()

        tiles = const_expr(p.tokens // 8)
        tokens = cute.make_rmem_tensor((PAIRS, tiles, p.pieces), Int32)
        tokens.fill(0)
        for tile in range_constexpr(tiles):
            token = first_token + line + 8 * tile
            start = a + cute.assume(Int64(token) * (stride_a // 2), divby=PAIRS)
            for i in range_constexpr(p.pieces):
                self.load(start, rank, warp, quarter, i, token < m, tokens[None, tile, i])
        parts = products(weights, tokens, p.pieces, tiles)

        source = rank * p.warps + warp
        for tile in range_constexpr(tiles):
            for half in range_constexpr(2):
                column = line + 8 * half
                at = source * row + (column % own) * p.tokens + 8 * tile + 2 * quarter
                pair = parts[tile][2 * half : 2 * half + 2]
                cute.arch.store_async_dsmem(
                    sums + cute.assume(at, divby=2),
                    (bits_of(pair[0]), bits_of(pair[1])),
                    arrived,
                    column // own,
                )
        cute.arch.mbarrier_wait(arrived, 0)

        # 4 results a warp at once, 8 lanes each.
        part, which = lane // 4, lane % 4
        found = cute.make_tensor(sums, cute.make_layout(const_expr(sources * row)))
        for i in range_constexpr(0, results, const_expr(4 * p.warps)):
            at = i + warp * 4 + which
            result = Float32(0.0)
            if at < results:
                for j in range_constexpr(0, sources, 8):
                    if j + part < sources:
                        result += float_of(found[(j + part) * row + at])
            for offset in (4, 8, 16):
                result += cute.arch.shuffle_sync_bfly(result, offset=offset)
            column = group * COLUMNS + rank * own + at // p.tokens
            token = first_token + at % p.tokens
            if part == 0 and at < results and column < n and token < m:
                if const_expr(p.bias is not None):
                    added = cute.make_tensor(bias + column, cute.make_layout(1))
                    result += added[0].to(Float32)
                place = out + Int64(token) * n + column
                cute.make_tensor(place, cute.make_layout(1))[0] = result

    @cute.jit
    def load(self, start, rank, warp, quarter, i: cutlass.Constexpr, wanted, target):
        """This lane's vector of piece i of its warp; what lies beyond stays zero."""
        share = const_expr(self.p.share)
        piece = i * self.p.warps + warp
        at = (rank * share + piece) * (PIECE // 2) + quarter * PAIRS
        vector = cute.make_tensor(start + cute.assume(at, divby=PAIRS), cute.make_layout(PAIRS))
        if const_expr(self.p.is_even):
            if wanted:
                cute.autovec_copy(vector, target)
        else:
            if wanted and piece < share and at < const_expr(self.p.k // 2):
                cute.autovec_copy(vector, target)


def products(weights, tokens, pieces, tiles):
    """The sums of this lane: of a tile of 8 tokens, rows ``line`` and ``line + 8``, two tokens
    each. Four chains of products: a tensor core cuts off what it adds to a sum, by up to 2^-23 of
    it (two chains: up to 3.5e-7 of the sum of magnitudes, K = 5120), and waits for the one before.
    """
    found = []
    for tile in range(tiles):
        chains = [[Float32(0.0)] * 4 for _ in range(4)]
        for i in range(pieces):
            for step in range(2):
                pairs = 2 * step, 2 * step + 1
                a = [weights[pair, half, i] for pair in pairs for half in range(2)]
                b = [tokens[pair, tile, i] for pair in pairs]
                chain = 2 * (i % 2) + step
                chains[chain] = mma_m16n8k16(a, b, chains[chain])
        found.append([(w + x) + (y + z) for w, x, y, z in zip(*chains, strict=True)])
    return found
