"""One small file per command, with the code that only this command needs."""
