"""Models: options in, nn.Module out."""
