"""The name of the originals' benchmark runner; Falconet's does the work."""
