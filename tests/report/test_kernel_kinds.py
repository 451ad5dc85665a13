"""What a kernel does, by its name: names of cuDNN, cuBLAS, NCCL, ATen and ours, as profiles show them."""

import re
from pathlib import Path

import pytest

import falconet
from falconet.report.profile.kernel_kinds import kind_of

ROOT = Path(falconet.__file__).parent

NAMES = {
    "convolution, forward": (
        "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x32x32_stage4_warpsize4x1x1_g1",
        "sm90_xmma_fprop_image_first_layer_f16f16_f32_f16_nhwckrsc_nh",
        "sm86_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32",
        "void cutlass_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_16x4_nhwc_align4>(Params)",
        "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, int, int)",
        "void conv2d_c1_k1_nhwc_kernel_specialized",
        "conv2d_grouped_direct_kernel<float>",
        "void cudnn::winograd_nonfused::winogradForwardOutput4x4",
        "maxwell_scudnn_winograd_128x128_ldg1_ldg4_relu_tile424n_nt_v1",
        "void fft2d_c2r_32x32<float, false, false, 0u, false, false>",
        "aten::mkldnn_convolution",
        "aten::cudnn_convolution",
        "aten::conv2d",
        "_convolve",
    ),
    "convolution, gradient of the input": (
        "sm90_xmma_dgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x32_warpgroupsize1x1x1_g1",
        "void cutlass_cudnn::Kernel<cutlass_tensorop_f16_s16816dgrad_optimized_f16_128x256_32x3_unity_stride>(Params)",
        "void convolveNd_dgrad_float_engine<float, 3>",
        "strided_dgrad_indexed",
        "_spread",
    ),
    "convolution, gradient of the weights": (
        "sm80_xmma_wgrad_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize32x256x32_stage3_warpsize1x4x1_g1",
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4",
        "void at::native::(anonymous namespace)::conv_depthwise2d_grad_weight_kernel<float, int>(PackedTensorAccessor)",
        "_sum_products",
    ),
    "convolution, backward": (
        "aten::convolution_backward",
        "cask_plugin__5x_cudnn::xmma__5x_cudnn::init_device_workspace",
        "_convolve_back",
        "_spread_and_sum",
    ),
    "norm": (
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct, float const*)",
        "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true>",
        "void cudnn::bn_fw_inf_1C11_kernel_NHWC<float>",
        "void at::native::batch_norm_transform_input_channels_last_kernel<c10::Half, float, c10::Half, 4>(c10::Half)",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long, float, float const*)",
        "aten::native_batch_norm_backward",
        "aten::native_group_norm",
        "_sum_moments",
        "_spread_gradients",
    ),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::BinaryFunctor<float>>>",
        "generatedNativePointwise",
        "aten::relu_",
        "aten::threshold_backward",
        "aten::silu",
        "aten::add_",
    ),
    "pooling": (
        "void at::native::(anonymous namespace)::max_pool_forward_nhwc<c10::Half, int>(c10::Half const*, int, int)",
        "void at::native::(anonymous namespace)::adaptive_average_pool<float>(float const*, float*, int, int)",
        "aten::max_pool2d_with_indices_backward",
        "_sum_pooled",
    ),
    "matrix product": (
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
        "nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT",
        "ampere_sgemm_128x128_tn",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)",
        "void splitKreduce_kernel<float, float, float, float>(cublasSplitKParams<float>, float const*, float const*)",
        "aten::addmm",
    ),
    "reduction and loss": (
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float>>>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*, float const*)",
        "aten::_log_softmax_backward_data",
        "aten::nll_loss_forward",
        "aten::sum",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<3>, FusedSgdMathFunctor>",
        "aten::_fused_sgd_",
        "aten::_foreach_add_",
        "Optimizer.step#SGD.step",
        "_ratios",
    ),
    "copies": (
        "nhwcAddPaddingKernel",
        "Memcpy HtoD (Pinned -> Device)",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(nchw2nhwc_params_t<float>)",
        "void cudnn::ops::convertTensor_kernel<float, float, float, (cudnnKernelDataType_t)2>(float, float const*)",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(TensorIteratorBase&)>",
        "aten::copy_",
        "aten::_to_copy",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "ncclKernel_ReduceScatter_fp32",
        "gloo:all_reduce",
        "c10d::allreduce_",
    ),
    "other": (
        "aten::as_strided",
        "aten::empty",
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
    ),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_the_name_of_a_kernel_tells_its_kind(kind, name):
    assert kind_of(name) == kind


def launched():
    """Our own kernels of models, losses and optimizers, which the sources launch as `_name[grid](`."""
    files = [
        *(ROOT / "models/fused").glob("*_kernels.py"),
        ROOT / "evaluation/loss_kernels.py",
        *(ROOT / "numerics/kernels").glob("*.py"),
    ]
    return launched_in(files)


def launched_in(files):
    return sorted(
        {name for file in files for name in re.findall(r"^\s+(_\w+)\[.*\]\(", file.read_text(), re.MULTILINE)}
    )


def test_each_of_our_own_kernels_has_a_kind():
    assert len(launched()) > 25
    assert [name for name in launched() if kind_of(name) in ("other", "elementwise")] == []
    of_pixels = launched_in((ROOT / "data").glob("*_kernels.py"))
    assert {name: kind_of(name) for name in of_pixels} == {
        "_change": "elementwise",
        "_look": "elementwise",
        "_normalise_levels": "elementwise",
        "_pick": "copies",
    }
