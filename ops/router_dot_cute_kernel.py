"""The router of one token as dot products, with the norm in front of it or without.

    r = 1 / sqrt(mean_k(x[k]^2) + eps);  out[n] = r * sum_k x[k] * weight[k] * b[n, k] + bias[n]
    y[k] = x[k] * r * weight[k];  total[k] = x[k] = x[k] + residual[k], rounded

A cluster of CTAs has some columns, and its CTAs divide K: each reads its share of the activation
and not all of it, and the sums meet in the shared memory of the CTA that stores the column
(``st.async``, which an mbarrier counts). Measured on an H200 (norm and router, K = 7168, N = 256):
2.13 us with clusters of 4, 2.33 of 2, 2.66 without.
The weight of the router and that of the norm come into registers before the PDL wait, that is while
the kernel in front still runs; the activation, and every store, come after it. Products of two
bfloat16 are exact in float32: the weight times the norm's weight, or the activation times it.

Imports CuTe DSL: only the compiler imports this module.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from compile_ext.ops.cute_device import bits_of, float_of, high, low, pack, sums_of_a_warp

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}
PAIRS = 4  # of bfloat16, in 16 bytes: the most that a thread loads at once


class RouterDot:
    """Args: ``router_cute_parameters.DotParameters``."""

    def __init__(self, parameters: Any) -> None:
        self.p = parameters

    def arguments(self) -> tuple[Any, ...]:
        """x, residual, weight, b, bias, y, total, out, stride_b, eps, n: what the host passes."""
        memory = AddressSpace.gmem
        pairs = make_ptr(Int32, 16, memory, assumed_align=16)
        dtype = DTYPES[self.p.bias or "float32"]
        bias = make_ptr(dtype, 16, memory, assumed_align=dtype.width // 8)
        out = make_ptr(Float32, 16, memory, assumed_align=4)
        return *[pairs] * 4, bias, pairs, pairs, out, Int64(8), Float32(0), Int32(1)

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        residual: cute.Pointer,
        weight: cute.Pointer,
        b: cute.Pointer,
        bias: cute.Pointer,
        y: cute.Pointer,
        total: cute.Pointer,
        out: cute.Pointer,
        stride_b: Int64,
        eps: Float32,
        n: Int32,
        stream,
    ):
        p = self.p
        self.kernel(x, residual, weight, b, bias, y, total, out, stride_b, eps, n).launch(
            grid=[cute.ceil_div(n, p.columns) * p.cluster, 1, 1],
            block=[p.threads, 1, 1],
            cluster=[p.cluster, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=p.blocks,
            preferred_smem_carveout=0,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        residual: cute.Pointer,
        weight: cute.Pointer,
        b: cute.Pointer,
        bias: cute.Pointer,
        y: cute.Pointer,
        total: cute.Pointer,
        out: cute.Pointer,
        stride_b: Int64,
        eps: Float32,
        n: Int32,
    ):
        p = const_expr(self.p)
        columns, vectors, own = p.columns, p.vectors, const_expr(p.columns // p.cluster)
        rows_of_sums = const_expr(own + p.has_norm)  # the last one: the sum of squares
        stride = const_expr(-(-p.sources // 4) * 4)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane, warp, rank, group = thread % 32, thread // 32, cta % p.cluster, cta // p.cluster
        sums = cute.arch.alloc_smem(Int32, const_expr(rows_of_sums * stride), 16)
        arrived = cute.arch.alloc_smem(Int64, 1, 8)

        # Before the wait: what no kernel of the graph writes.
        rows = cute.make_rmem_tensor((PAIRS, vectors, columns), Int32)
        norm = cute.make_rmem_tensor((PAIRS, vectors), Int32)
        if const_expr(not p.is_even):
            rows.fill(0)
            norm.fill(0)
        for c in range_constexpr(columns):
            row = Int64(cutlass.min(group * columns + c, n - 1)) * (stride_b // 2)
            for v in range_constexpr(vectors):
                self.load(b + cute.assume(row, divby=PAIRS), rank, v, thread, rows[None, v, c])
        if const_expr(p.has_weight):
            for v in range_constexpr(vectors):
                self.load(weight, rank, v, thread, norm[None, v])
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(p.cluster > 1):
            if thread == 0:
                cute.arch.mbarrier_init(arrived, 1)
                cute.arch.mbarrier_init_fence()
                bytes = const_expr(rows_of_sums * p.sources * 4)
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, bytes)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        wide = cute.make_rmem_tensor((2 * PAIRS, vectors, columns), Float32)
        if const_expr(p.widens):
            widen(wide, rows, norm, p)
        cute.arch.griddepcontrol_wait()

        values = cute.make_rmem_tensor((PAIRS, vectors), Int32)
        if const_expr(not p.is_even):
            values.fill(0)
        for v in range_constexpr(vectors):
            self.load(x, rank, v, thread, values[None, v])
        if const_expr(p.adds):
            others = cute.make_rmem_tensor((PAIRS, vectors), Int32)
            if const_expr(not p.is_even):
                others.fill(0)
            for v in range_constexpr(vectors):
                self.load(residual, rank, v, thread, others[None, v])
            add(values, others)
        values_of_sums = products(rows, wide, norm, values, p)

        # The sums of a warp go to the CTA that has the column, the sum of squares to all.
        source = rank * (p.threads // 32) + warp
        found, first = sums_of_a_warp(values_of_sums, lane)
        for i in range_constexpr(const_expr(len(found))):
            c = first + i
            if lane % const_expr(max(1, 32 // len(values_of_sums))) == 0:
                if c < columns:
                    self.send(found[i], sums + (c % own) * stride + source, arrived, c // own)
                if const_expr(p.has_norm) and c == columns:
                    for other in range_constexpr(p.cluster):
                        self.send(found[i], sums + own * stride + source, arrived, other)
        if const_expr(p.cluster > 1):
            cute.arch.mbarrier_wait(arrived, 0)
        else:
            cute.arch.sync_threads()

        scale = Float32(1.0)
        if const_expr(p.has_norm):
            mean = row_sum(sums, own * stride, p.sources) * const_expr(1.0 / p.k)
            scale = cute.math.rsqrt(mean + eps)
        for i in range_constexpr(0, own, p.threads):
            at = i + thread
            column = group * columns + rank * own + at
            if at < own and column < n:
                result = row_sum(sums, at * stride, p.sources) * scale
                if const_expr(p.bias is not None):
                    added = cute.make_tensor(bias + column, cute.make_layout(1))
                    result += added[0].to(Float32)
                cute.make_tensor(out + column, cute.make_layout(1))[0] = result
        if const_expr(p.has_norm):
            # Each cluster knows the whole norm: they share the work of storing it.
            groups = cute.ceil_div(n, columns)
            for v in range_constexpr(vectors):
                if (v * p.threads + thread) % groups == group:
                    rounded = cute.make_rmem_tensor((PAIRS,), Int32)
                    normed(rounded, values, norm, scale, v, p)
                    self.store(rounded, y, rank, v, thread)
                    if const_expr(p.adds):
                        self.store(values[None, v], total, rank, v, thread)

    @cute.jit
    def load(self, source, rank, v: cutlass.Constexpr, thread, target):
        """One vector of this CTA's share of K; what lies beyond stays as it is."""
        share = const_expr(self.p.share)
        at = v * self.p.threads + thread
        place = source + cute.assume((rank * share + at) * PAIRS, divby=PAIRS)
        vector = cute.make_tensor(place, cute.make_layout(PAIRS))
        if const_expr(self.p.is_even):
            cute.autovec_copy(vector, target)
        else:
            if at < share and rank * share + at < const_expr(self.p.k // (2 * PAIRS)):
                cute.autovec_copy(vector, target)

    @cute.jit
    def store(self, vector, target, rank, v: cutlass.Constexpr, thread):
        share = const_expr(self.p.share)
        at = v * self.p.threads + thread
        if at < share and rank * share + at < const_expr(self.p.k // (2 * PAIRS)):
            place = target + cute.assume((rank * share + at) * PAIRS, divby=PAIRS)
            cute.autovec_copy(vector, cute.make_tensor(place, cute.make_layout(PAIRS)))

    @cute.jit
    def send(self, value, place, arrived, rank):
        """To the shared memory of a CTA of the cluster."""
        if const_expr(self.p.cluster > 1):
            cute.arch.store_async_dsmem(place, bits_of(value), arrived, rank)
        else:
            cute.make_tensor(place, cute.make_layout(1))[0] = bits_of(value)


def row_sum(sums, start, sources):
    """The sum over all sources, in this thread: loads of 16 bytes that all threads share, and no
    shuffles, each of which takes as long as six additions."""
    parts = []
    for i in range(0, sources, 4):
        width = min(4, sources - i)
        held = cute.make_rmem_tensor((width,), Int32)
        place = sums + cute.assume(start + i, divby=4)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(width)), held)
        parts += [float_of(held[j]) for j in range(width)]
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [x[0] + x[1] if len(x) == 2 else x[0] for x in pairs]
    return parts[0]


def widen(wide, rows, norm, p):
    """The router's weight in float32, times the norm's."""
    for v in range(p.vectors):
        for i in range(PAIRS):
            for c in range(p.columns):
                pair = low(rows[i, v, c]), high(rows[i, v, c])
                if p.has_weight:
                    pair = pair[0] * low(norm[i, v]), pair[1] * high(norm[i, v])
                wide[2 * i, v, c], wide[2 * i + 1, v, c] = pair


def add(values, others):
    """The sum as it is stored: rounded to bfloat16."""
    for i in range(cute.size(values)):
        first = low(values[i]) + low(others[i])
        values[i] = pack(first, high(values[i]) + high(others[i]))


def products(rows, wide, norm, values, p):
    """This thread's share of each column's sum, then of the sum of squares; zeros up to a power of
    two of them."""
    dots = [Float32(0.0)] * (1 << (p.columns + p.has_norm - 1).bit_length())
    for v in range(p.vectors):
        for i in range(PAIRS):
            for half, part in enumerate((low, high)):
                value = part(values[i, v])
                if p.has_norm:
                    dots[p.columns] += value * value
                if p.has_weight and not p.widens:
                    value *= part(norm[i, v])
                for c in range(p.columns):
                    row = wide[2 * i + half, v, c] if p.widens else part(rows[i, v, c])
                    dots[c] += row * value
    return dots


def normed(rounded, values, norm, scale, v, p):
    """One vector of y."""
    for i in range(PAIRS):
        pair = low(values[i, v]) * scale, high(values[i, v]) * scale
        if p.rounds:
            once = pack(*pair)
            pair = low(once), high(once)
        if p.has_weight:
            pair = pair[0] * low(norm[i, v]), pair[1] * high(norm[i, v])
        rounded[i] = pack(*pair)
