"""Values in, nn.Module out."""
