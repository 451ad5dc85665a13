"""Layers computed by kernels of our own, and the fusion that finds them in a network."""
