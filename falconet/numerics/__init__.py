"""Numbers in training: formats, rounding, the loss scale, recomputed activations, our kernels."""
