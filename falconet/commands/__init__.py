"""One small file a command; wiring only."""
