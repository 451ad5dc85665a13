"""Fused kernels, each beside the plain torch function it must equal. Triton is imported on CUDA alone, when needed."""
