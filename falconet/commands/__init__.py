"""One small file a command that a person types, and what only that command needs; the rest is `wiring`."""
