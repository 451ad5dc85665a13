"""Fused kernels, each beside the plain torch function it must equal. Triton is imported on CUDA alone, when needed."""

# A product and a sum rounded once. Triton's own default up to 3.9, which warns that 3.10 will have another.
FUSED = {"enable_fp_fusion": True}
