"""Reporting: the console, metrics and files of a run."""
