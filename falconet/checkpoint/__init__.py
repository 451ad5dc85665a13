"""Checkpoints: writing, reading, choosing and averaging them, and weights of other programs."""
