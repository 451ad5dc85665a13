"""Numbers in training: formats, rounding, the loss scale, activations that are computed again, kernels of our own."""
