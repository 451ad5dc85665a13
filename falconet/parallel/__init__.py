"""Processes and devices; the only folder that uses torch.distributed."""
