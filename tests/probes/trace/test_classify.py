"""Kernel and operator names to categories; spellings of kinds and dtypes."""

from __future__ import annotations

import pytest

from costlab.probes.trace import classify as c
from costlab.probes.trace.columns import Message

KERNELS = {
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": c.MATMUL,
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT": c.MATMUL,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(cutlass_80::Params)": c.MATMUL,
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>>(pytorch_flash::Params)": c.MATMUL,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": c.MATMUL,
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": c.MATMUL,
    "sm80_xmma_fprop_implicit_gemm_indexed_bf16bf16_bf16f32": c.MATMUL,
    "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64": c.MATMUL,
    "triton_tem_fused_addmm_3": c.MATMUL,
    "attn_fwd": c.MATMUL,
    "splitKreduce_kernel<32, 16, int, float>": c.MATMUL,
    "triton_poi_fused_convolution_relu_3": c.MEMORY,
    "triton_red_fused__unsafe_view_add_mm_all_gather_into_tensor_1": c.MEMORY,
    "triton_per_fused__scaled_dot_product_flash_attention_view_2": c.MEMORY,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float)": c.MEMORY,
    "void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int)": c.MEMORY,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>(at::gemm)": c.MEMORY,
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>": c.MEMORY,
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(float)": c.MEMORY,
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": c.COMMUNICATION,
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)": c.COMMUNICATION,
    "mscclKernel_Sum_half": c.COMMUNICATION,
    "void c10d::symmetric_memory::two_shot_all_reduce_kernel<float>": c.COMMUNICATION,
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 8>": c.COMMUNICATION,
    "oneShotLamportAllReduceKernel": c.COMMUNICATION,
}


@pytest.mark.parametrize(("name", "category"), KERNELS.items(), ids=[n[:40] for n in KERNELS])
def test_device_kernels_by_name(name: str, category: str) -> None:
    assert c.device_category(name, "kernel") == category


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("Memcpy HtoD (Pinned -> Device)", c.COPY),
        ("Memcpy DtoH (Device -> Pageable)", c.COPY),
        ("Memcpy DtoD (Device -> Device)", c.MEMORY),
        ("Memcpy PtoP (Device -> Device)", c.COMMUNICATION),
    ],
)
def test_copies_by_direction(name: str, category: str) -> None:
    assert c.device_category(name, "gpu_memcpy") == category


def test_metadata_and_tags_come_before_the_name() -> None:
    name = "ring_step_gemm_like_name"
    assert c.kernel_category(name, "kernel", None, tagged=False, in_collective=False) == c.MATMUL
    assert (
        c.kernel_category(name, "kernel", Message(elements_in=5), tagged=False, in_collective=False) == c.COMMUNICATION
    )
    assert c.kernel_category(name, "kernel", None, tagged=True, in_collective=False) == c.COMMUNICATION
    assert c.kernel_category(name, "kernel", None, tagged=False, in_collective=True) == c.COMMUNICATION
    assert c.kernel_category("Memset", "gpu_memset", None, tagged=False, in_collective=False) == c.MEMORY


@pytest.mark.parametrize(
    ("op", "category"),
    [
        ("aten::mm", c.MATMUL),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", c.MATMUL),
        ("aten::mkldnn_convolution", c.MATMUL),
        ("mkldnn::_linear_pointwise", c.MATMUL),
        ("graph_0_cpp_fused_native_layer_norm_0", c.MEMORY),
        ("cpp_fused_mm_gelu_1", c.MEMORY),
        ("aten::add_", c.MEMORY),
        ("aten::copy_", c.MEMORY),
        ("torchvision::nms", c.OTHER),
        ("aten::as_strided", None),
        ("aten::to", None),
        ("detach", None),
        ("c10d::_allgather_base_", None),
        ("fsdp::all_gather_copy_in", None),
        ("CompiledFunctionBackward", None),
        ("autograd::engine::evaluate_function: MmBackward0", None),
        ("Torch-Compiled Region: 0/0", None),
    ],
)
def test_cpu_operators(op: str, category: str | None) -> None:
    assert c.cpu_category(op) == category


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("allreduce_coalesced", "all_reduce"),
        ("nccl:all_to_all", "all_to_all"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", "send_recv"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::recv_any_source_", "recv"),
        ("send", "send"),
        ("barrier", "barrier"),
        ("wait", ""),
        ("aten::mm", ""),
    ],
)
def test_collective_kinds(name: str, kind: str) -> None:
    assert c.collective_kind(name) == kind


@pytest.mark.parametrize(
    ("dtype", "size", "name"),
    [
        ("BFloat16", 2, "bfloat16"),
        ("c10::BFloat16", 2, "bfloat16"),
        ("Float", 4, "float32"),
        ("float", 4, "float32"),
        ("long int", 8, "int64"),
        ("Long", 8, "int64"),
        ("unsigned char", 1, "uint8"),
        ("Float8_e4m3fn", 1, "float8_e4m3fn"),
        ("c10::Half", 2, "float16"),
        ("something new", None, "somethingnew"),
        (None, None, ""),
    ],
)
def test_dtypes(dtype: str | None, size: int | None, name: str) -> None:
    assert (c.element_size(dtype), c.dtype_name(dtype)) == (size, name)
