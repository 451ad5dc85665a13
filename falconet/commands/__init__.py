"""One small file a command, and what only that command needs."""
