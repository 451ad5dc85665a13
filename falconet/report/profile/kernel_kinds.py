"""The kinds of kernels and operators, derived from their names: convolution, norm, copy and so on.

Nothing else is known in a captured update: the operator that launches a kernel is known only during the capture.
"""

import re
from functools import cache
from typing import Literal

Kind = Literal[
    "convolution, forward",
    "convolution, gradient of the input",
    "convolution, gradient of the weights",
    "convolution, backward",
    "norm",
    "elementwise",
    "pooling",
    "matrix product",
    "reduction and loss",
    "optimizer",
    "copies",
    "communication",
    "other",
]
# The first that is found in the name decides. Names of Triton's kernels are ours, so they match as a whole.
_TABLE: tuple[tuple[Kind, str], ...] = (
    ("communication", r"nccl|c10d::|gloo:|all_?reduce|reduce_scatter|all_?gather|mscclpp|nvshmem"),
    (
        "optimizer",
        r"Optimizer\.|_fused_(sgd|adam|adamw|adagrad)|Fused(Sgd|Adam|Adagrad)|multi_tensor_apply|_foreach_"
        r"|^(_kernel|_squares|_ratios)$|amp_",
    ),
    (
        "copies",
        r"^Memcpy|AddPadding|^_pack$|^_pick$|^_expand$|convertTensor|setTensor|^Memset|nchwToNhwc|nhwcToNchw|CatArray|copy_kernel|_to_copy|aten::(copy_|cat|clone|contiguous)$",
    ),
    ("copies", r"aten::(pin_memory|_pin_memory|index_select|stack|fill_|zero_)$|FillFunctor|tensorTransformGeneric"),
    # Norms come before convolutions, because cuDNN's are in the same namespaces.
    ("norm", r"batch_?norm|group_?norm|layer_?norm|bn_(fw|bw)|BatchNorm|GroupNorm|RowwiseMoments|proxy_?norm"),
    (
        "norm",
        r"^_(sum|merge)_(moments|gradients|slopes|parameters|own|replicas|images)$|^_weigh_images$|^_spread_(gradients|excited)$"
        r"|^_normalise$|^_excite$|^_moments(_slopes)?$|^_elements$|^_slopes$",
    ),
    ("pooling", r"pool|^_(sum|spread)_pooled$|^_halve(_normed)?$|^_spread_(halved|peak)$|^_peak$"),
    ("reduction and loss", r"softmax|nll_loss|cross_entropy|NllLoss|^_(score_rows|merge_scores|spread_loss)$"),
    (
        "convolution, gradient of the weights",
        r"wgrad|bwd_?weight|backward_?(filter|weight)|conv_depthwise2d_grad_weight",
    ),
    ("convolution, gradient of the weights", r"^_(sum|merge)_products$|^_merge_weights$|^_merge$|^_sum_bias$"),
    (
        "convolution, gradient of the input",
        r"dgrad|bwd_?data|backward_?(data|input)|conv_depthwise2d_backward|^_spread$",
    ),
    (
        "convolution, backward",
        r"convolution_?backward|init_device_workspace|^_convolve_back$|^_spread_and_sum$",
    ),
    (
        "convolution, forward",
        r"fprop|^_convolve$|conv(2d|olve|olution)|winograd|fft2d_|implicit_(gemm|precomp)|cudnn::cnn",
    ),
    ("matrix product", r"gemm|gemv|nvjet|cutlass|splitK|cublas|aten::(mm|addmm|bmm|linear|matmul|addmv|mv|dot)$"),
    ("reduction and loss", r"reduce_kernel|topk|sort|aten::(sum|mean|argmax|amax)$"),
    ("reduction and loss", r"aten::(logsumexp|_log_softmax|norm|max|min|var|std|all|any)$|DeviceReduce|gatherTopK"),
    (
        "elementwise",
        r"elementwise|pointwise|aten::(relu|silu|hardswish|hardtanh|hardsigmoid|sigmoid|gelu|clamp|threshold|add|sub|mul|div|where"
        r"|exp|log|sqrt|neg|eq|ne|lt|gt|le|ge|isfinite|bernoulli|dropout|native_dropout|lerp|addc\w+)",
    ),
    ("elementwise", r"dropout|aten::(rand|normal|uniform)|distribution_|triton_poi"),
    ("elementwise", r"^_(resize|look|change|normalise_levels)$"),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _TABLE)


@cache
def kind_of(name: str) -> Kind:
    """The kind of a GPU kernel, or of a torch operator."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")
