"""The device code of ``router_gemm_cute``. Imports CuTe DSL: only the compiler imports this module.

out[n] = sum_k a[k] * b[n, k] + bias[n], one token. A CTA has a few columns; its threads divide K in
vectors of 16 bytes. The first tiles of the weight come into registers before the PDL wait, that is
while the kernel in front still runs; the activation comes after it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

VECTOR = 8  # bfloat16 values in 16 bytes


class Router:
    def __init__(self, parameters: Any) -> None:
        self.p = parameters

    def arguments(self) -> tuple[Any, ...]:
        """a, b, bias, out, n: what the host passes."""
        memory = AddressSpace.gmem
        bf16 = make_ptr(BFloat16, 16, memory, assumed_align=16)
        f32 = make_ptr(Float32, 16, memory, assumed_align=4)
        return bf16, bf16, f32, f32, Int32(1)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        bias: cute.Pointer,
        out: cute.Pointer,
        n: Int32,
        stream,
    ):
        grid = [cute.ceil_div(n, self.p.columns), 1, 1]
        block = [self.p.threads, 1, 1]
        self.kernel(a, b, bias, out, n).launch(grid=grid, block=block, stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self, a: cute.Pointer, b: cute.Pointer, bias: cute.Pointer, out: cute.Pointer, n: Int32
    ):
        k, columns, threads = self.p.k, self.p.columns, self.p.threads
        step = const_expr(threads * VECTOR)
        tiles = const_expr((k + step - 1) // step)
        warps = const_expr(threads // 32)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        first = cta * columns
        cute.arch.griddepcontrol_launch_dependents()

        weight = cute.make_rmem_tensor((VECTOR, tiles, columns), BFloat16)
        token = cute.make_rmem_tensor((VECTOR, tiles), BFloat16)
        weight.fill(0.0)  # behind K
        token.fill(0.0)
        for tile in range_constexpr(tiles):
            if const_expr(tile == self.p.prefetch):
                cute.arch.griddepcontrol_wait()
            at = tile * step + thread * VECTOR
            for c in range_constexpr(columns):
                column = cutlass.min(first + c, n - 1)  # the last CTA reads its last row again
                if const_expr((tile + 1) * step <= k) or at < k:
                    start = b + cute.assume(Int64(column) * k + at, divby=VECTOR)
                    row = cute.make_tensor(start, cute.make_layout(VECTOR))
                    cute.autovec_copy(row, weight[None, tile, c])
        if const_expr(self.p.prefetch >= tiles):
            cute.arch.griddepcontrol_wait()
        for tile in range_constexpr(tiles):
            at = tile * step + thread * VECTOR
            if const_expr((tile + 1) * step <= k) or at < k:
                vector = cute.make_tensor(
                    a + cute.assume(at, divby=VECTOR), cute.make_layout(VECTOR)
                )
                cute.autovec_copy(vector, token[None, tile])

        sums = cute.make_rmem_tensor((columns,), Float32)
        sums.fill(0.0)
        for c in range_constexpr(columns):
            for tile in range_constexpr(tiles):
                x = token[None, tile].load().to(Float32)
                w = weight[None, tile, c].load().to(Float32)
                for i in range_constexpr(VECTOR):
                    sums[c] = sums[c] + x[i] * w[i]

        layout = cute.make_layout((warps, columns))
        partial = cute.make_tensor(cute.arch.alloc_smem(Float32, warps * columns), layout)
        for c in range_constexpr(columns):
            total = cute.arch.warp_reduction_sum(sums[c])
            if thread % 32 == 0:
                partial[thread // 32, c] = total
        cute.arch.sync_threads()
        if thread < columns and first + thread < n:
            total = Float32(0.0)
            for warp in range_constexpr(warps):
                total = total + partial[warp, thread]
            if const_expr(self.p.has_bias):
                total = total + cute.make_tensor(bias, cute.make_layout(n))[first + thread]
            cute.make_tensor(out, cute.make_layout(n))[first + thread] = total
