"""One small file per command, with what only that command needs."""
