"""Falconet: convolutional image classifiers with PyTorch, from a laptop to a cluster."""

__version__ = "0.1.0"
