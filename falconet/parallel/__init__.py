"""Processes and devices; the only place that says torch.distributed."""
