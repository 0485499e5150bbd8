"""What a device kernel, copy or CPU operator is: matmul, memory, communication, copy or other."""

from __future__ import annotations

import re
from functools import cache

from costlab.probes.trace.columns import Message

MATMUL, MEMORY, COMMUNICATION, COPY, OTHER = "matmul", "memory", "communication", "copy", "other"

TAG_COMM = "costlab::comm::"

_COMM_KERNEL = re.compile(
    r"nccl|rccl|msccl|nvshmem|one_?shot|two_?shot|multimem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|^gloo:|^mpi:|^ucc:|^xccl:|oneccl",
    re.IGNORECASE,
)
_MATMUL_KERNEL = re.compile(
    r"(?<!fb)gemm|gemv|(?:^|_)b?mm_|cutlass|cublas|nvjet|xmma|wgmma|s\d+_?cudnn|matmul|cijk_|tensile|triton_tem_|triton_mm"
    r"|convolve|conv\dd|_conv_|convolution|implicit_|winograd|dgrad|wgrad|fprop|miopen.*conv|igemm"
    r"|flash_?(?:fwd|bwd|attn|attention|mla|decod|prefill)|fmha|attn_(?:fwd|bwd)|attention|mha_(?:fwd|bwd)|splitkreduce|splitk_reduce|dot_kernel"
    r"|cppmicrogemm|cpp_\w*gemm",
    re.IGNORECASE,
)
_DEVICE_PAIR = re.compile(r"memcpy\s*(htod|dtoh|dtod|ptop|htoh)", re.IGNORECASE)

_MATMUL_OPS = re.compile(
    r"^(?:aten::(?:mm|bmm|addmm|baddbmm|addbmm|addmv|mv|dot|vdot|_int_mm|_scaled_mm|_grouped_mm|_addmm_activation"
    r"|linear|matmul|convolution\w*|_convolution\w*|conv\w+|thnn_conv\w*|slow_conv\w*|_slow_conv\w*|mkldnn_\w+|cudnn_conv\w*"
    r"|miopen_conv\w*|_conv_depthwise\w*|_nnpack\w*|_mkldnn\w*|_?scaled_dot_product_\w+|_flash_attention\w*|_efficient_attention\w*"
    r"|einsum|tensordot|_trilinear|lstm|gru|_thnn_fused_\w+)"
    r"|mkldnn::\w+|mkl::\w+|onednn::\w+|flash_attn\w*::\w+|xformers\w*::\w+)$"
)
_VIEWS = """
as_strided as_strided_ view _unsafe_view view_as reshape _reshape_alias _reshape_copy flatten unflatten expand
expand_as transpose transpose_ t t_ permute select slice narrow split split_with_sizes chunk unbind squeeze squeeze_
unsqueeze unsqueeze_ detach detach_ alias resolve_conj resolve_neg conj _conj real imag view_as_real view_as_complex
diagonal unfold tensor_split hsplit vsplit movedim swapaxes mT numpy_T lift_fresh empty empty_like empty_strided
new_empty new_empty_strided _efficientzerotensor is_pinned size stride numel sym_size requires_grad_ set_ set_data
resize_ result_type can_cast broadcast_tensors meshgrid item _local_scalar_dense is_nonzero
_has_compatible_shallow_copy_type _nested_tensor_size data promote_types output_nr _version retain_grad
record_stream refine_names
"""
_HELPERS = """
to _to_copy copy_ fill_ zero_ zeros zeros_like ones ones_like full full_like new_zeros new_ones new_full clone
contiguous scalar_tensor constant_pad_nd
"""
_VIEW_OPS = frozenset(_VIEWS.split())
_HELPER_OPS = _VIEW_OPS | frozenset(_HELPERS.split())
_WRAPPERS = frozenset({"aten::to", "aten::contiguous", "aten::type_as", "aten::float", "aten::cpu", "aten::cuda"})
_NO_COMPUTE = re.compile(
    r"^(?:c10d(?:_functional)?::|_c10d_functional::|fsdp::|record_param_comms|autograd::|torch::autograd::|torch::jit"
    r"|profiler::|symm_mem::|TorchDynamo|Torch-Compiled|CompiledFunction|Pregraph|AOTDispatcher|Optimizer\.|\[)"
)
_INDUCTOR_KERNEL = re.compile(r"^(?:graph_\d+_\w|(?:graph_\d+_)?cpp_\w|triton_\w)")

_SIZES = {
    1: "byte char uint8 int8 bool unsignedchar signedchar float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu",
    2: "half bfloat16 short float16 int16 uint16",
    4: "float int float32 int32 uint32 unsignedint",
    8: "double long float64 int64 uint64 longint longlong complexfloat c10::complex<float> complex64 unsignedlong",
    16: "complexdouble c10::complex<double> complex128",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_DTYPE = {
    "byte": "uint8",
    "unsignedchar": "uint8",
    "char": "int8",
    "signedchar": "int8",
    "half": "float16",
    "short": "int16",
    "float": "float32",
    "int": "int32",
    "double": "float64",
    "long": "int64",
    "longint": "int64",
}

_KINDS = (
    (re.compile(r"all_?gather|allgather"), "all_gather"),
    (re.compile(r"reduce_?scatter"), "reduce_scatter"),
    (re.compile(r"all_?reduce"), "all_reduce"),
    (re.compile(r"all_?to_?all"), "all_to_all"),
    (re.compile(r"send_?recv"), "send_recv"),
    (re.compile(r"broadcast"), "broadcast"),
    (re.compile(r"barrier"), "barrier"),
    (re.compile(r"scatter"), "scatter"),
    (re.compile(r"gather"), "gather"),
    (re.compile(r"reduce"), "reduce"),
    (re.compile(r"recv"), "recv"),
    (re.compile(r"send"), "send"),
)


def _key(dtype: str) -> str:
    return dtype.lower().removeprefix("torch.").removeprefix("c10::").removeprefix("at::").replace(" ", "")


def element_size(dtype: str | None) -> int | None:
    """Bytes an element takes, from any spelling profilers use (Float, c10::BFloat16, long int); None if unknown."""
    return _SIZE_OF.get(_key(dtype)) if dtype else None


def dtype_name(dtype: str | None) -> str:
    """torch's name of a dtype, "" where it is not recorded."""
    key = _key(dtype) if dtype else ""
    return _DTYPE.get(key, key)


@cache
def collective_kind(name: str) -> str:
    """all_gather, reduce_scatter, all_reduce, broadcast, send ... from an operator's or kernel's name, "" if none."""
    lower = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    for pattern, kind in _KINDS:
        if pattern.search(lower):
            return kind
    return ""


def without_fused_names(kernel: str) -> str:
    """An Inductor kernel's name without the fused operators: `triton_poi_fused_conv_3` computes no convolution."""
    return re.sub(r"fused_.*", "", kernel) if _INDUCTOR_KERNEL.match(kernel) else kernel


def _function(kernel: str) -> str:
    """A kernel's function name alone: template and call arguments name types, not what is computed."""
    name = kernel.replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", name, maxsplit=1)[0]


@cache
def device_category(name: str, cat: str) -> str:
    """Category of a device event by its name and profiler category alone; metadata and tags come first."""
    if cat == "gpu_memset":
        return MEMORY
    if cat == "gpu_memcpy":
        pair = _DEVICE_PAIR.search(name)
        direction = pair.group(1).lower() if pair else ""
        return {"dtod": MEMORY, "ptop": COMMUNICATION}.get(direction, COPY)
    own = without_fused_names(_function(name))
    if _COMM_KERNEL.search(own):
        return COMMUNICATION
    if _MATMUL_KERNEL.search(own):
        return MATMUL
    return MEMORY


def kernel_category(name: str, cat: str, message: Message | None, tagged: bool, in_collective: bool) -> str:
    """Category of a device event.

    Args:
        message: what the event's own metadata says of a collective, None when it says nothing.
        tagged: launched under a `costlab::comm::` annotation.
        in_collective: launched directly by a collective's operator (record_param_comms, symm_mem::*).
    """
    described = message is not None and (message.collective is not None or message.elements_in is not None)
    if described or tagged or in_collective:
        return COMMUNICATION
    return device_category(name, cat)


@cache
def is_view(op: str) -> bool:
    """An operator that moves no data: views, allocation, metadata."""
    base = op.removeprefix("aten::")
    return base.split(".")[0] in _VIEW_OPS and (op.startswith("aten::") or "::" not in op)


@cache
def is_helper(op: str) -> bool:
    """An operator that others call to prepare operands; it does not make its caller a mere wrapper."""
    return (op.startswith("aten::") and op.removeprefix("aten::").split(".")[0] in _HELPER_OPS) or is_view(op)


@cache
def cpu_category(op: str) -> str | None:
    """Category of a CPU operator's own work, None for bookkeeping (views, autograd nodes, dispatch, annotations)."""
    if is_view(op) or op in _WRAPPERS or _NO_COMPUTE.match(op):
        return None
    if _MATMUL_OPS.match(op):
        return MATMUL
    if _INDUCTOR_KERNEL.match(op):
        return MATMUL if _MATMUL_KERNEL.search(without_fused_names(op)) else MEMORY
    if op.startswith("aten::"):
        return MEMORY
    return OTHER if "::" in op and " " not in op else None
