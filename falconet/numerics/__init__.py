"""The numerics of training: formats, rounding, the loss scale, recomputed activations, our kernels."""
