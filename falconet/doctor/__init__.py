"""Checks of a machine: what it has, what limits training on it, and whether its processes work together."""
