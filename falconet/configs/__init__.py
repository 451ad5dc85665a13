"""Named configs: stored command lines, with what they reach."""
