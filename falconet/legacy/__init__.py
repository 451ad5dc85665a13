"""Everything that knows an original: its command lines, launchers, log lines and file names."""
