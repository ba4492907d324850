"""Custom ops: one file an op, one file a kernel. Imports torch, and nothing else of the package."""

from compile_ext.ops.add_rms_norm import add_rms_norm
from compile_ext.ops.add_rms_norm_quantize_fp8 import add_rms_norm_quantize_fp8
from compile_ext.ops.attn_residual import attn_residual
from compile_ext.ops.block_scaled_mm import block_scaled_mm
from compile_ext.ops.block_scaled_mm_m1 import block_scaled_mm_m1
from compile_ext.ops.contract import Align, Gemm, OpContract, Pad
from compile_ext.ops.fp8_bmm import fp8_bmm
from compile_ext.ops.grouped_block_scaled_mm import grouped_block_scaled_mm
from compile_ext.ops.grouped_block_scaled_mm_masked import grouped_block_scaled_mm_masked
from compile_ext.ops.quantize import (
    dequantize_fp8_blocks,
    dequantize_fp8_groups,
    quantize_fp8_blocks,
    quantize_fp8_groups,
    quantize_fp8_per_token,
)
from compile_ext.ops.registry import contract_of, register_contract
from compile_ext.ops.rms_norm import rms_norm
from compile_ext.ops.rms_norm_quantize_fp8 import rms_norm_quantize_fp8
from compile_ext.ops.rms_norm_router import rms_norm_router
from compile_ext.ops.rms_norm_router_topk import rms_norm_router_topk
from compile_ext.ops.router_gemm import router_gemm
from compile_ext.ops.router_gemm_m1 import router_gemm_m1
from compile_ext.ops.router_topk import router_topk
from compile_ext.ops.scaled_mm import scaled_mm

__all__ = [
    "Align",
    "Gemm",
    "OpContract",
    "Pad",
    "add_rms_norm",
    "add_rms_norm_quantize_fp8",
    "attn_residual",
    "block_scaled_mm",
    "block_scaled_mm_m1",
    "contract_of",
    "dequantize_fp8_blocks",
    "dequantize_fp8_groups",
    "fp8_bmm",
    "grouped_block_scaled_mm",
    "grouped_block_scaled_mm_masked",
    "quantize_fp8_blocks",
    "quantize_fp8_groups",
    "quantize_fp8_per_token",
    "register_contract",
    "rms_norm",
    "rms_norm_quantize_fp8",
    "rms_norm_router",
    "rms_norm_router_topk",
    "router_gemm",
    "router_gemm_m1",
    "router_topk",
    "scaled_mm",
]
