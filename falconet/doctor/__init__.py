"""What a machine has, what limits a training on it, and whether its processes work together."""
