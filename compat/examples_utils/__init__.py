"""The originals' benchmark runner, run by Falconet."""
