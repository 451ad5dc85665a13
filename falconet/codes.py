"""Exit codes, the same of every program here: scripts and launchers rely on them."""

DONE = 0
FAILED = 1  # our own fault, or that of a process that went away
MISTAKE = 2  # the user's, said in one line
SLOWER = 3  # `falconet bench --compare`: it ran, and lost more than the margin
INTERRUPTED = 130  # Ctrl-C, or a scheduler's signal
