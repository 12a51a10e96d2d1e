"""What a kernel is, as far as its name tells: the family it belongs to, its precision, and whether it uses Tensor
Cores."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class KernelName(NamedTuple):
    """Family (``gemm``, ``conv``, …, ``other``) and, for products, the precision of the inputs."""

    family: str
    precision: str = ""  # fp32 (no Tensor Cores), tf32, half, fp8, int8, fp64, or "" if the name does not tell

    @property
    def is_product(self) -> bool:
        return self.family in ("gemm", "conv")


# The first that matches decides, so the narrow ones come first. What a compiler made of light ops is called after all
# of them, and after products beside them (triton_poi_fused_add_mm_relu): it is no product, and it is fused already.
_FAMILIES: tuple[tuple[str, str], ...] = (
    ("fused", r"triton_(poi|red|per|for|spl)_fused_(?!.*(softmax|loss|cross_entropy|norm|embedding|index_put))"),
    ("communication", r"nccl|rccl|msccl|all_?reduce_kernel|one_shot_all_reduce|nvshmem"),
    ("conv", r"xmma_(fprop|dgrad|wgrad)|implicit_gemm|implicitgemm|s\d+(fprop|dgrad|wgrad)|conv_depthwise"),
    ("index", r"fbgemm_gpu|bounds_check"),
    ("layout", r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw|tensortransformgeneric|converttensor|nchwaddpadding"),
    ("attention", r"flash|fmha|attention|\bmha_|sdpa|convert_dq"),
    ("loss", r"nll_loss|cross_entropy|logsoftmax|log_softmax"),
    ("softmax", r"softmax"),
    ("optimizer", r"fused_?adam|fused_?sgd|adam_kernel|lamb_|multi_tensor_apply_kernel.*(adam|sgd|lamb)"),
    ("foreach", r"multi_tensor_apply_kernel"),
    ("norm", r"layer_?norm|rms_?norm|batch_?norm|group_?norm|bn_fw|bn_bw|rowwisemoments|gammabeta|computegradinput"
             r"|computeinternalgradients|computefusedparams"),
    ("embedding", r"embedding|compute_grad_weight|krn_partial|krn_partials|sum_and_scatter|compute_num_of_partial"),
    ("sort", r"radix|devicesort|merge_?sort|onesweep|bitonic|segmentedsort|sort_postprocess|topk|gathertopk"),
    ("index", r"index|gather|scatter|take_|masked_select|nonzero"),
    ("conv", r"conv|winograd|scudnn|fprop|dgrad|wgrad|cudnn.*(gemm|engine)|im2col|col2im|fft2d|depthwise"),
    ("gemm", r"gemm|gemv|cutlass|nvjet|splitkreduce|dot_kernel|cublas|_mm_|matmul|triton_(tem|mm)|device_kernel.*gmma"),
    ("dropout", r"dropout|philox|bernoulli"),
    ("copy", r"direct_copy|copy_kernel|float16_copy|bfloat16_copy|catarraybatchedcopy|cat_?batched|batched_?copy"),
    ("random", r"distribution_|random_"),
    ("fill", r"fillfunctor|fill_kernel|memset"),
    ("pool", r"pool"),
    ("fused", r"triton_"),
    ("reduce", r"reduce_kernel|reduce_|devicereduce|devicescan|cumsum|scan_"),
    ("pointwise", r"elementwise|functor|pointwise|binary_op|unary_op|op_tensor|glu_|gelu|silu|triu|tril|where_kernel"),
)  # fmt: skip
_FAMILY = tuple((family, re.compile(pattern)) for family, pattern in _FAMILIES)
_PRECISIONS: tuple[tuple[str, str], ...] = (
    ("fp8", r"e4m3|e5m2|fp8|qgmma|nvjet_(sm\d+_)?[qo][a-z]{2}_"),
    ("int8", r"i8816|i16832|int8|imma|s8s8|i8i8"),
    ("fp64", r"dgemm|d884|f64|double"),
    ("tf32", r"tf32|tensorop_s1688|nvjet_(sm\d+_)?s[a-z]{2}_"),
    ("half", r"h884|h1688|h16816|s884|s16816|turing_s1688|volta_s884|fp16|bf16|f16f16|half|hgemm|bfloat16|hmma"
             r"|f16_s|hgmma|_h_h|nvjet_(sm\d+_)?[htb][a-z]{2}_"),
    ("fp32", r"sgemm|simt|scudnn|gemmsn|ffma|winograd|implicit_convolve|f32f32_f32f32_f32|gemmk1|[dw]grad2d|cgemm|fft2d"
             r"|_engine<float|gemv\w*<.*float, float, float"),
)  # fmt: skip
_PRECISION = tuple((precision, re.compile(pattern)) for precision, pattern in _PRECISIONS)


@lru_cache(maxsize=200_000)
def kernel_name(name: str) -> KernelName:
    """Family and precision of a kernel."""
    lowered = name.lower()
    family = next((family for family, pattern in _FAMILY if pattern.search(lowered)), "other")
    if family not in ("gemm", "conv", "attention"):
        return KernelName(family)
    return KernelName(family, next((found for found, pattern in _PRECISION if pattern.search(lowered)), ""))
