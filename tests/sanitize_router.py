"""Run by tests/test_gpu_sanitizer.py under compute-sanitizer: routers over odd N, K and M.

Prints ``clean`` at the end; wrong values are an AssertionError. With
PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, so that a read past its
end is seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops.define import definition_of

OPS = torch.ops.compile_ext
SHAPES = ((1, 8), (7, 72), (33, 1032), (129, 2056), (3, 130))
TOKENS = (1, 2, 5, 9)


def each_kernel(op: str, *args: object) -> list[tuple[str, object]]:
    definition = definition_of(getattr(OPS, op).default)
    assert definition is not None
    run = [k for k in definition.kernels if k.name != "reference" and k.why_not(*args) is None]
    return [(k.name, k.launch(args, prefetch=p)) for k in run for p in (False, True)]


def check(got: object, want: Tensor, where: object) -> None:
    assert isinstance(got, Tensor)
    # Sums in float32 of numbers near 1, and cuBLAS cuts off what it adds.
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4), where


def main() -> None:
    for n, k in SHAPES:
        b = torch.randn(n, k, device="cuda").bfloat16() / k**0.5
        bias, weight = torch.randn(n, device="cuda"), torch.rand(k, device="cuda").bfloat16()
        for m in TOKENS:
            a = torch.randn(m, k, device="cuda").bfloat16()
            want = a.double() @ b.double().t() + bias.double()
            for name, got in each_kernel("router_gemm", a, b, bias):
                check(got, want, (name, m, n, k))
        x, residual = (torch.randn(1, k, device="cuda").bfloat16() for _ in range(2))
        total = x + residual
        exact = total.double() * torch.rsqrt((total.double() ** 2).mean() + 1e-6) * weight.double()
        args = x, residual, weight, 1e-6, False, b, bias
        for name, found in each_kernel("rms_norm_router", *args):
            assert isinstance(found, tuple)
            assert torch.equal(found[1], total), (name, n, k)
            check(found[2], exact @ b.double().t() + bias.double(), (name, n, k))
    torch.cuda.synchronize()
    print("clean")


if __name__ == "__main__":
    with torch.no_grad():
        main()
