"""Contracts of FP8 ops that other packages register, by name: "namespace::name.overload".

The names are looked up when a graph calls them, so a package that is absent costs nothing. Each
entry claims only what the named source proves, for every call that the op accepts. Sources:
vLLM 0.33, sgl-kernel 0.4, SGLang 0.5, FBGEMM GenAI 1.9, DeepGEMM, kernels-community, torch 2.13.

Ops whose kernels come compiled with their package say so. Those that compile at run time, through
Triton, DeepGEMM or FlashInfer, do not say what: ``sites`` lists them as not covered.

Left out on purpose: vLLM's quantization, norm and activation ops (``_C::*_fp8_quant``,
``_C::rms_norm*``, ``_C::silu_and_mul*``). They do not compare the rows of their buffers with those
of the input: a longer buffer, as vLLM's num_token_padding makes, keeps what its last rows held.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from compile_ext.ops.compile_unit import compiles_nothing
from compile_ext.ops.contract import Align, Gemm, OpContract


def _is_wide_output(*, out_dtype: torch.dtype | None = None, **_: object) -> bool:
    """Output of 16 or 32 bits. Without out_dtype it is that of the FP8 input."""
    return out_dtype is not None and out_dtype.itemsize > 1


_ATEN_GEMM = Gemm(
    a="self", b="mat2", layout="nn", scale_a="scale_a", scale_b="scale_b", bias="bias"
)
# ``Tensor! out`` and no result: N stays, a wider buffer would have to be cut by its other readers.
_CUTLASS_K = Align(16, pad={"a": 0, "b": 0})

CONTRACTS: Mapping[str, OpContract] = MappingProxyType(
    {
        # pytorch aten/src/ATen/native/cuda/ScaledBlas.cpp, native/ScaledBlas.cpp (CPU). No align:
        # CUDA refuses other sizes before a pass sees them, the CPU takes them as they are.
        "aten::_scaled_mm.default": OpContract(
            gemm=_ATEN_GEMM,
            unread={"scale_result": _is_wide_output},
            compile_units=compiles_nothing,
        ),
        # the same; cuda/CUDABlas.cpp: beta is 0 and C another pointer; K = 0 is zeroed
        "aten::_scaled_mm.out": OpContract(
            gemm=_ATEN_GEMM,
            unread={"scale_result": _is_wide_output},
            overwritten=("out",),
            compile_units=compiles_nothing,
        ),
        # the same; the scales are lists, which a contract cannot name
        "aten::_scaled_mm_v2.default": OpContract(
            gemm=Gemm(a="self", b="mat2", layout="nn", bias="bias"),
            compile_units=compiles_nothing,
        ),
        # vllm csrc/libtorch_stable/quantization/w8a8/cutlass/scaled_mm_entry.cu
        "_C::cutlass_scaled_mm.default": OpContract(
            gemm=Gemm(
                a="a", b="b", layout="nn", scale_a="a_scales", scale_b="b_scales", bias="bias"
            ),
            align={"k": _CUTLASS_K},
            overwritten=("out",),
            compile_units=compiles_nothing,
        ),
        # the same: int8; zeros in b leave azp_adj, the sum over K, as it is
        "_C::cutlass_scaled_mm_azp.default": OpContract(
            gemm=Gemm(
                a="a", b="b", layout="nn", scale_a="a_scales", scale_b="b_scales", bias="bias"
            ),
            align={"k": _CUTLASS_K},
            overwritten=("out",),
            compile_units=compiles_nothing,
        ),
        # vllm/model_executor/kernels/linear/scaled_mm/deep_gemm.py; DeepGEMM csrc/apis/gemm.hpp
        "vllm::fp8_gemm_nt_op.default": OpContract(
            gemm=Gemm(a="q_input", b="weight", scale_a="input_scale", scale_b="weight_scale"),
            overwritten=("output",),
        ),
        # vllm/model_executor/kernels/linear/scaled_mm/triton.py
        "vllm::w8a8_triton_block_scaled_mm_func.default": OpContract(
            gemm=Gemm(a="qx", b="weight", scale_a="x_scale", scale_b="weight_scale")
        ),
        # vllm/model_executor/kernels/linear/scaled_mm/flashinfer.py: bfloat16 in, no scale of it
        "vllm::flashinfer_fp8_blockscale_gemm.default": OpContract(
            gemm=Gemm(a="input", b="weight", scale_b="weight_scale")
        ),
        # the same
        "vllm::dynamic_flashinfer_deepgemm_blockscale_gemm.default": OpContract(
            gemm=Gemm(a="input", b="weight", scale_b="weight_scale")
        ),
        # sglang sgl-kernel/csrc/gemm/fp8_gemm_kernel.cu: rows of 16 bytes, 2-byte output
        "sgl_kernel::fp8_scaled_mm.default": OpContract(
            gemm=Gemm(
                a="mat_a",
                b="mat_b",
                layout="nn",
                scale_a="scales_a",
                scale_b="scales_b",
                bias="bias",
            ),
            align={
                "n": Align(8, pad={"mat_b": 0, "scales_b": 1.0, "bias": 0}),
                "k": Align(16, pad={"mat_a": 0, "mat_b": 0}),
            },
            compile_units=compiles_nothing,
        ),
        # sglang sgl-kernel/csrc/gemm/fp8_blockwise_gemm_kernel.cu (until sgl-kernel 0.3)
        "sgl_kernel::fp8_blockwise_scaled_mm.default": OpContract(
            gemm=Gemm(a="mat_a", b="mat_b", layout="nn", scale_a="scales_a", scale_b="scales_b"),
            compile_units=compiles_nothing,
        ),
        # sglang/kernels/ops/gemm/fp8_blockwise_gemm.py: does not check the size of ``out``
        "sglang::fp8_blockwise_scaled_mm.default": OpContract(
            gemm=Gemm(a="mat_a", b="mat_b", layout="nn", scale_a="scales_a", scale_b="scales_b")
        ),
        # sglang/kernels/ops/gemm/fp8_kernel.py; its build of DeepGEMM was not read: no overwritten
        "sglang::deep_gemm_fp8_fp8_bf16_nt.default": OpContract(
            gemm=Gemm(a="A", b="B", scale_a="As", scale_b="Bs")
        ),
        # sglang/srt/layers/quantization/fp8_utils.py
        "sglang::flashinfer_gemm_fp8_nt_groupwise.default": OpContract(
            gemm=Gemm(a="q_input", b="weight", scale_a="x_scale", scale_b="weight_scale")
        ),
        # the same
        "sglang::flashinfer_bmm_fp8.default": OpContract(
            gemm=Gemm(
                a="q_input", b="weight", layout="nn", scale_a="x_scale", scale_b="weight_scale"
            )
        ),
        # sglang/kernels/jit/csrc/gemm/per_tensor_quant_fp8.cuh: sizes are compared. Never output_s:
        # an atomic max accumulates into it, so the zeros of the caller are read.
        "sglang::per_tensor_quant_fp8.default": OpContract(overwritten=("output_q",)),
        # FBGEMM .../quantize/cutlass_extensions/f8f8bf16_rowwise/f8f8bf16_rowwise_common.cuh
        "fbgemm::f8f8bf16_rowwise.default": OpContract(
            gemm=Gemm(a="XQ", b="WQ", scale_a="x_scale", scale_b="w_scale", bias="bias"),
            align={
                "n": Align(8, pad={"WQ": 0, "w_scale": 1.0, "bias": 0}),
                "k": Align(16, pad={"XQ": 0, "WQ": 0}),
            },
            compile_units=compiles_nothing,
        ),
        # the same. Never ``output``: where K is 0 the op returns before it writes.
        "fbgemm::f8f8bf16_rowwise_out.default": OpContract(
            gemm=Gemm(a="XQ", b="WQ", scale_a="x_scale", scale_b="w_scale", bias="bias"),
            align={"k": Align(16, pad={"XQ": 0, "WQ": 0})},
            compile_units=compiles_nothing,
        ),
        # kernels-community finegrained-fp8/torch-ext/finegrained_fp8/matmul.py, early builds: later
        # ones register in a namespace that ends in a hash
        "finegrained_fp8::w8a8_block_fp8_matmul.default": OpContract(
            gemm=Gemm(a="A", b="B", scale_a="As", scale_b="Bs")
        ),
    }
)

# Functions of torch that Dynamo leaves in the graph as they are, in the place of their overload.
ATEN_FUNCTIONS = {
    name.split("::")[1].split(".")[0] for name in CONTRACTS if name.startswith("aten::")
}
