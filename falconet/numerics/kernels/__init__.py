"""Fused update kernels, and the plain torch functions that they equal; Triton is imported on CUDA, when needed."""

# A product and a sum are rounded once. The default up to Triton 3.9, which warns that 3.10 will change it.
FUSED = {"enable_fp_fusion": True}
